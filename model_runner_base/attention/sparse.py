"""Latent attention to the keys that an indexer chose (sparse attention, DSA); attention/choice.py makes the plans."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionLayer

from model_runner_base.attention.choice import SparseMetadata, is_chosen
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
            assert attn_metadata.left, "the first layer of a step has no indexer"
            chosen = attn_metadata.left[-1]
        return super().forward(layer, query, key, value, kv_cache, chosen, output)

    def _is_chosen(self, plan: PairPlan) -> torch.Tensor:
        return is_chosen(plan)
