"""Latent attention to the keys that an indexer chose (sparse attention, DSA); attention/choice.py makes the plans."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionLayer

from model_runner_base.attention.choice import SparseMetadata
from model_runner_base.attention.latent import LatentAttentionBackend, LatentAttentionImpl
from model_runner_base.attention.metadata import PairPlan


class SparseLatentBackend(LatentAttentionBackend):
    """Attention backend, as vLLM knows it, of layers with latents that see chosen keys, and of their indexers' keys:
    one backend, so that both caches have one plan."""

    reads_lines: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type["SparseLatentImpl"]:
        return SparseLatentImpl


class SparseLatentImpl(LatentAttentionImpl):
    """Attention in the latents' space to the keys that the layer's indexer, or an earlier layer's, has chosen."""

    OF_SPARSE: ClassVar[tuple[str, ...]] = ("indexer", "topk_indices_buffer", "index_group_builder")
    """Arguments that vLLM gives to sparse attention alone, in some release; what is chosen is in the metadata."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{name: value for name, value in kwargs.items() if name not in self.OF_SPARSE})

    def record_logical_topk_ready(self) -> None:
        """Does nothing: some releases of vLLM say by it that an indexer has run."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: SparseMetadata | None,  # type: ignore[override]
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        chosen = None
        if attn_metadata is not None:
            chosen = attn_metadata.chosen
            assert chosen is not None, "the first layer of a step has no indexer"
        return super().forward(layer, query, key, value, kv_cache, chosen, output)

    def _is_chosen(self, plan: PairPlan) -> torch.Tensor:
        assert plan.chosen is not None and plan.pair_start is not None
        chosen, start, num_keys = plan.chosen[plan.pair_tile], plan.pair_start.view(-1, 1, 1), plan.kv_tile
        # At most S of the positions are the pair's own, and they follow each other.
        first = (chosen < start).sum(dim=2, keepdim=True)
        index = first + torch.arange(min(num_keys, chosen.shape[2]), device=first.device)
        place = chosen.gather(2, index.clamp(max=chosen.shape[2] - 1)) - start
        place = torch.where((place >= 0) & (place < num_keys), place, num_keys).long()
        is_chosen = torch.zeros((*place.shape[:2], num_keys + 1), dtype=torch.bool, device=place.device)
        return is_chosen.scatter(2, place, True)[..., :num_keys].unsqueeze(1)
