"""The attention layer over the NKI kernels: same metadata, same cache, same plan as the openxla attention.

A custom op hides the kernels from Dynamo and tells it their shapes; the lazy trace that follows calls them. Not run on
Neuron hardware.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config

from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl, PagedAttentionMetadata
from neuron_runner.nki.availability import NKI_VARIABLE, require_nki
from neuron_runner.nki.operands import decode_operands, tile_operands
from neuron_runner.nki.tiling import Tiling


class NkiAttentionBackend(PagedAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        """With ``enforce_eager`` the model runs on the host, where there are no kernels."""
        return PagedAttentionImpl if get_current_vllm_config().model_config.enforce_eager else NkiAttentionImpl


class NkiAttentionImpl(PagedAttentionImpl):
    """Raises NotImplementedError for layers with ALiBi or attention sinks, ValueError for sizes that do not fit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_nki()
        super().__init__(*args, **kwargs)
        lacking = [name for name in ("alibi_slopes", "sinks") if getattr(self, name) is not None]
        if lacking:
            raise NotImplementedError(
                f"the NKI attention kernel does not support {' and '.join(lacking)}: set {NKI_VARIABLE}=0 to run "
                f"attention as plain torch"
            )

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: PagedAttentionMetadata
    ) -> torch.Tensor:
        out = paged_flash_attention(
            query.view(-1, self.num_heads, self.head_size),
            kv_cache,
            attn_metadata,
            self.scale,
            self.sliding_window,
            self.logits_soft_cap or 0.0,
        )
        return out.view(query.shape)


def paged_flash_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: PagedAttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention over the cached keys and values of a step, the active tokens' among them.

    Args:
        query: [T, H, D].
        kv_cache: [blocks, block size, 2 * K, D], of the same dtype.

    Returns [T, H, D]; zeros for padding tokens of a mixed step. Raises ValueError where the sizes do not fit.
    """
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = kv_cache.shape[2] // 2
    query_tile = 1 if meta.tile_tokens is None else meta.tile_tokens.shape[1]
    if query.dtype != kv_cache.dtype:
        raise ValueError(f"the kernel needs query and cache of one dtype, got {query.dtype} and {kv_cache.dtype}")
    kv_tile = meta.geometry.kv_tile
    tiling = Tiling(num_heads, num_kv_heads, head_size, query_tile, kv_tile, query.element_size())
    flat = query.reshape(num_tokens * num_heads, head_size)
    cache = kv_cache.view(-1, 2 * num_kv_heads * head_size)
    if meta.tile_tokens is None:
        decode = decode_operands(meta, tiling, window)
        out = attend_pairs(
            flat,
            cache,
            decode.rows,
            decode.bounds,
            decode.queries,
            decode.tree,
            list(decode.level_rows),
            num_heads,
            num_kv_heads,
            scale,
            window or 0,
            soft_cap,
        )
        return out[: num_tokens * num_heads].view(query.shape)
    tiles = tile_operands(meta, tiling, window)
    out = attend_tiles(
        flat,
        cache,
        tiles.rows,
        tiles.bounds,
        tiles.queries,
        tiles.outputs,
        tiles.ranges,
        num_heads,
        num_kv_heads,
        query_tile,
        scale,
        window or 0,
        soft_cap,
    )
    return torch.where(tiles.is_token.view(-1, 1, 1), out.view(query.shape), 0.0)


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
    """On the device, or by NKI's own simulator where the tensors lie on the host."""
    import nki

    run = nki.simulate(kernel) if query.device.type == "cpu" else nki.jit(kernel)
    return run(query, *arguments)
