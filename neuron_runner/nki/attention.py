"""Attention layer over the NKI kernels, with the cache and the plans of the attention in plain torch.

Custom operators tell a capture the shapes of the kernels' results; lazy tracing calls the kernels. Not run on Neuron
hardware.
"""

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config

from model_runner_base.attention.cache_format import AS_THEY_ARE
from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl
from neuron_runner.config import read_neuron_config
from neuron_runner.nki.availability import NKI_VARIABLE, require_nki
from neuron_runner.nki.operands import decode_operands, tile_operands
from neuron_runner.nki.tiling import Tiling


class NkiAttentionBackend(PagedAttentionBackend):
    reads_lines: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        """Class of the attention layers: over the kernels, or in plain torch where they cannot run.

        With ``enforce_eager`` the model runs on the host, where there are no kernels; backends of Dynamo take none.
        Raises NotImplementedError if the kernels would have to verify drafts.
        """
        config = get_current_vllm_config()
        if config.model_config.enforce_eager or not read_neuron_config(config.additional_config).runs_on_xla:
            return PagedAttentionImpl
        if config.speculative_config is not None:
            raise NotImplementedError(
                f"the NKI attention kernel does not support the verification of drafts yet: set {NKI_VARIABLE}=0 to "
                "run attention as plain torch, or leave out speculative_config"
            )
        return NkiAttentionImpl


class NkiAttentionImpl(PagedAttentionImpl):
    """Attention by two kernels, one for decode rows and one for tiles of chunks; a mixed step runs both.

    Raises NotImplementedError for layers with ALiBi, attention sinks, cross-attention or a cache of 8 bits. Attending
    raises ValueError for sizes that do not fit, and where query and cache are not of one dtype.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_nki()
        super().__init__(*args, **kwargs)
        lacking = [name for name in ("alibi_slopes", "sinks") if getattr(self, name) is not None]
        lacking += ["cross-attention"] if self.is_cross else []
        lacking += [] if self.numbers is AS_THEY_ARE else ["kv_cache_dtype=fp8"]
        if lacking:
            raise NotImplementedError(
                f"the NKI attention kernel does not support {' and '.join(lacking)}: set {NKI_VARIABLE}=0 to run "
                f"attention as plain torch"
            )

    def attend_decode(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        lines, cache, tiling = self._lay_out(query, kv_cache, plan)
        operands = decode_operands(plan, tiling, self.sliding_window)
        out = attend_pairs(
            lines,
            cache,
            operands.rows,
            operands.bounds,
            operands.queries,
            operands.tree,
            list(operands.level_rows),
            self.num_heads,
            self.num_kv_heads,
            self.scale,
            self.sliding_window or 0,
            self.logits_soft_cap or 0.0,
        )
        return out[: lines.shape[0]].view(query.shape)

    def attend_chunks(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        """Attention of chunks' tokens; zeros for padding tokens."""
        lines, cache, tiling = self._lay_out(query, kv_cache, plan)
        operands = tile_operands(plan, tiling, self.sliding_window)
        out = attend_tiles(
            lines,
            cache,
            operands.rows,
            operands.bounds,
            operands.queries,
            operands.outputs,
            operands.ranges,
            self.num_heads,
            self.num_kv_heads,
            tiling.query_tile,
            self.scale,
            self.sliding_window or 0,
            self.logits_soft_cap or 0.0,
        )
        return torch.where(operands.is_token.view(-1, 1), out.view(query.shape), 0.0)

    def _lay_out(
        self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan
    ) -> tuple[torch.Tensor, torch.Tensor, Tiling]:
        """Queries as [tokens * H, D], the cache as [positions, 2 * K * D], and the layout of their pairs."""
        if query.dtype != kv_cache.dtype:
            raise ValueError(f"the kernel needs query and cache of one dtype, got {query.dtype} and {kv_cache.dtype}")
        sizes = self.num_heads, self.num_kv_heads, self.head_size
        tiling = Tiling(*sizes, plan.last.shape[1], plan.kv_tile, query.element_size())
        cache = kv_cache.view(-1, 2 * self.num_kv_heads * self.head_size)
        return query.reshape(-1, self.head_size), cache, tiling


@torch.library.custom_op("neuron_runner::attend_tiles", mutates_args=())
def attend_tiles(
    query: torch.Tensor,
    cache: torch.Tensor,
    rows: torch.Tensor,
    bounds: torch.Tensor,
    queries: torch.Tensor,
    outputs: torch.Tensor,
    ranges: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    query_tile: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    from neuron_runner.nki import kernel

    tensors = (query, cache, rows, bounds, queries, outputs, ranges)
    return _launch(kernel.attend_tiles, *tensors, num_heads, num_kv_heads, query_tile, scale, window, soft_cap)


@attend_tiles.register_fake
def _(query: torch.Tensor, *operands: Any) -> torch.Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("neuron_runner::attend_pairs", mutates_args=())
def attend_pairs(
    query: torch.Tensor,
    cache: torch.Tensor,
    rows: torch.Tensor,
    bounds: torch.Tensor,
    queries: torch.Tensor,
    tree: torch.Tensor,
    level_rows: list[int],
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    from neuron_runner.nki import kernel

    tensors = (query, cache, rows, bounds, queries, tree)
    sizes = (tuple(level_rows), num_heads, num_kv_heads, scale, window, soft_cap)
    return _launch(kernel.attend_pairs, *tensors, *sizes)


@attend_pairs.register_fake
def _(
    query: torch.Tensor, cache: Any, rows: Any, bounds: Any, queries: Any, tree: Any, level_rows: list[int], *sizes: Any
) -> torch.Tensor:
    return query.new_empty(level_rows[-1], query.shape[1])


def _launch(kernel: Any, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Runs a kernel on the device, or in NKI's own simulator if the tensors are on the host."""
    import nki

    run = nki.simulate(kernel) if query.device.type == "cpu" else nki.jit(kernel)
    return run(query, *arguments)
