"""Paged attention over a block-sparse plan, in plain torch.

The same code runs eager on any torch device and inside a compiled graph: shapes are static, the cache is written in
place, masked values are finite. Softmax and merging are in float32.

Shapes: P pairs, Q query tile, S KV tile, H heads, K KV heads, G = H / K, D head size.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from model_runner_base.attention.plan import PlanGeometry
from model_runner_base.cache_ops import write_slots

MASK_VALUE = -1e30
MAX_DIAGONAL_KV_HEADS = 8
"""Up to so many, a product over all KV heads at once costs less than one a head, most of it by zeros as it is."""


@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """Where this step's keys and values go, and the plan, on the device. All int32, sizes padded."""

    geometry: PlanGeometry
    slot_blocks: torch.Tensor
    """[T] cache block that each token is written to."""
    slot_offsets: torch.Tensor
    """[T] offset in that block."""
    pair_tile: torch.Tensor
    """[P]"""
    pair_offset: torch.Tensor
    """[P] position of the query tile's first token, counted from the start of the pair's KV tile."""
    pair_last: torch.Tensor
    """[P] that of its last token: what lies behind it is not the request's."""
    pair_blocks: torch.Tensor | None
    """[P, blocks a KV tile]; None if pair i is the front of cache line i, whatever its length (attention/lines.py)."""
    merge_tree: list[torch.Tensor]
    """[nodes, FAN_IN] a level"""
    tile_tokens: torch.Tensor | None = None
    """[NT, Q] token indices of each query tile, any behind its last; None if tile i is token i (uniform decode)."""
    token_slots: torch.Tensor | None = None
    """[T] where a token's output lies in the flattened tiles."""
    line_tiles: int = 0
    """KV tiles at the front of each cache line that are read, where ``pair_blocks`` is None."""


class PagedAttentionBackend(AttentionBackend):
    """vLLM attention backend of every device that has no attention kernels of its own."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type["PagedAttentionImpl"]:
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        # The base plans attention itself (model_runner_base.attention_metadata).
        raise NotImplementedError("layers with metadata of their own (chunked local attention) are not supported yet")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Keys and values of a token lie side by side: heads ``[:K]`` are keys, ``[K:]`` values."""
        return (num_blocks, block_size, 2 * num_kv_heads, head_size)


class PagedAttentionImpl(AttentionImpl[PagedAttentionMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> None:
        refused = [name for name, value in unsupported.items() if value is not None]
        if attn_type != AttentionType.DECODER:
            refused.append(f"{attn_type} attention")
        if kv_cache_dtype != "auto":
            refused.append(f"kv_cache_dtype={kv_cache_dtype}")
        if refused:
            raise NotImplementedError(f"paged attention in plain torch does not support: {', '.join(refused)}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes keys and values to the cache, then attends. ``query`` [T, H * D]; returns [T, H * D].

        A layer that shares the cache of another finds it written.
        """
        if self.kv_sharing_target_layer_name is None:
            key = key.view(-1, self.num_kv_heads, self.head_size)
            value = value.view(-1, self.num_kv_heads, self.head_size)
            write_slots(kv_cache, attn_metadata.slot_blocks, attn_metadata.slot_offsets, key, value)
        return self.attend(query, kv_cache, attn_metadata)

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: PagedAttentionMetadata
    ) -> torch.Tensor:
        """Attention over the cache, in which the active tokens' keys and values lie already; [T, H * D] both ways.

        A device with a kernel of its own overrides this.
        """
        if attn_metadata.tile_tokens is None and self.num_kv_heads <= MAX_DIAGONAL_KV_HEADS:
            partial = self._attend_single_queries(query, kv_cache, attn_metadata)
        else:
            partial = self._attend_pairs(query, kv_cache, attn_metadata)
        for tree in attn_metadata.merge_tree:
            partial = _merge(*partial, tree)
        return self._untile(*partial, attn_metadata, query.shape[0]).to(query.dtype)

    def _attend_pairs(
        self, query: torch.Tensor, kv_cache: torch.Tensor, meta: PagedAttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Partial results of every pair: unnormalised output [P, K, Q * G, D], maximum and sum [P, K, Q * G, 1]."""
        heads, kv_heads, head_size = self.num_heads, self.num_kv_heads, self.head_size
        group = heads // kv_heads
        query = query.view(-1, heads, head_size)
        if meta.tile_tokens is None:
            tile = 1
            tiles = query[meta.pair_tile]
        else:
            tile = meta.tile_tokens.shape[1]
            tiles = query[meta.tile_tokens[meta.pair_tile].view(-1)]
        # [P, Q, K, G, D] -> [P, K, Q * G, D]
        tiles = tiles.view(-1, tile, kv_heads, group, head_size).transpose(1, 2)
        tiles = tiles.reshape(-1, kv_heads, tile * group, head_size)
        keys, values = self._read(kv_cache, meta)
        kv_tile = keys.shape[1]

        # How far each key lies behind each query: negative ones are in the query's future.
        position = torch.arange(kv_tile, dtype=torch.int32, device=query.device)
        index = torch.arange(tile, dtype=torch.int32, device=query.device)
        distance = meta.pair_offset.view(-1, 1, 1) + index.view(1, -1, 1) - position.view(1, 1, -1)
        distance = distance.view(-1, 1, tile, 1, kv_tile).expand(-1, 1, tile, group, kv_tile)
        distance = distance.reshape(-1, 1, tile * group, kv_tile)
        products = torch.matmul(tiles.float(), keys.float().permute(0, 2, 3, 1))
        slopes = self._slopes(query.device)
        if slopes is not None:
            slopes = self._by_row(slopes, tile)
        scores, visible = self._scores(products, distance, slopes)

        values = torch.where(self._is_own(meta, position).view(-1, kv_tile, 1, 1), values, 0.0)
        maximum = scores.amax(dim=-1, keepdim=True)
        weights = torch.where(visible, torch.exp(scores - maximum), 0.0)
        total = weights.sum(dim=-1, keepdim=True)
        out = torch.matmul(weights.to(values.dtype), values.transpose(1, 2))
        return out.float(), maximum, total

    def _read(self, kv_cache: torch.Tensor, meta: PagedAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of every pair, each [P, S, K, D]."""
        if meta.pair_blocks is None:
            tiles = read_lines(kv_cache, meta.pair_offset.shape[0], meta.line_tiles)
            return tiles[..., : self.num_kv_heads, :], tiles[..., self.num_kv_heads :, :]
        shape = (-1, meta.geometry.kv_tile, self.num_kv_heads, self.head_size)
        # Two gathers, not one that is split after: a compiler then gathers straight into each product's layout.
        keys = kv_cache[:, :, : self.num_kv_heads][meta.pair_blocks]
        values = kv_cache[:, :, self.num_kv_heads :][meta.pair_blocks]
        return keys.view(shape), values.view(shape)

    def _attend_single_queries(
        self, query: torch.Tensor, kv_cache: torch.Tensor, meta: PagedAttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``_attend_pairs`` where a tile is one token (decode) and KV heads are few, G rows a KV head.

        Each pair's keys and values stay the matrices [S, K * D] that the gather makes: queries are laid out
        block-diagonally, zero but for their own KV head's columns, and of the output only those columns are kept.
        """
        kv_heads, head_size = self.num_kv_heads, self.head_size
        group = self.num_heads // kv_heads
        tiles = query.view(-1, kv_heads, 1, group, head_size)[meta.pair_tile]
        own = torch.eye(kv_heads, dtype=query.dtype, device=query.device).view(1, kv_heads, kv_heads, 1, 1)
        # [P, K, K', G, D] -> [P, K' * D, H]
        tiles = (tiles * own).permute(0, 2, 4, 1, 3).reshape(-1, kv_heads * head_size, self.num_heads)
        keys, values = (x.flatten(2) for x in self._read(kv_cache, meta))

        position = torch.arange(keys.shape[1], dtype=torch.int32, device=query.device)
        distance = (meta.pair_offset.view(-1, 1) - position.view(1, -1)).unsqueeze(-1)
        products = torch.matmul(keys.float(), tiles.float())
        scores, visible = self._scores(products, distance, self._slopes(query.device))

        values = torch.where(self._is_own(meta, position).unsqueeze(-1), values, 0.0)
        maximum = scores.amax(dim=1, keepdim=True)
        weights = torch.where(visible, torch.exp(scores - maximum), 0.0)
        total = weights.sum(dim=1)
        out = torch.matmul(weights.to(values.dtype).transpose(1, 2), values)
        out = out.view(-1, kv_heads, group, kv_heads, head_size)
        out = torch.stack([out[:, head, :, head] for head in range(kv_heads)], dim=1)
        rows = (-1, kv_heads, group, 1)
        return out.float(), maximum.view(rows), total.view(rows)

    def _slopes(self, device: torch.device) -> torch.Tensor | None:
        """[H] float32, whatever the model's dtype: distances are long."""
        slopes = self.alibi_slopes
        return None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device)

    def _scores(
        self, products: torch.Tensor, distance: torch.Tensor, slopes: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of products of queries and keys, all float32, and which of them the queries see."""
        scores = products * self.scale
        if self.logits_soft_cap:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        visible = distance >= 0
        if self.sliding_window is not None:
            visible = visible & (distance < self.sliding_window)
        if slopes is not None:
            scores = scores - slopes * distance
        return torch.where(visible, scores, MASK_VALUE), visible

    def _is_own(self, meta: PagedAttentionMetadata, position: torch.Tensor) -> torch.Tensor:
        """[P, S] bool: whether an entry of a pair's KV tile is the request's, and in a token's sight.

        Behind the tile's last token, and before its window, lies whatever other requests left: a weight of 0 would not
        silence a NaN there.
        """
        is_own = position.view(1, -1) <= meta.pair_last.view(-1, 1)
        if self.sliding_window is not None:
            is_own = is_own & (meta.pair_offset.view(-1, 1) - position.view(1, -1) < self.sliding_window)
        return is_own

    def _untile(
        self,
        out: torch.Tensor,
        maximum: torch.Tensor,
        total: torch.Tensor,
        meta: PagedAttentionMetadata,
        num_tokens: int,
    ) -> torch.Tensor:
        """Normalises and puts the tiles back into token order: [NT, K, Q * G, D] -> [T, H * D]."""
        if self.sinks is not None:
            out, total = self._sink(out, maximum, total)
        # A padded tile saw nothing: its sum is 0, and its output must stay finite.
        out = out / total.clamp(min=1e-30)
        if meta.token_slots is None:
            return out.reshape(num_tokens, self.num_heads * self.head_size)
        group = self.num_heads // self.num_kv_heads
        out = out.view(out.shape[0], self.num_kv_heads, -1, group, self.head_size).transpose(1, 2)
        return out.reshape(-1, self.num_heads * self.head_size)[meta.token_slots]

    def _sink(self, out: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds each head's sink: a score that takes its share of the softmax and gives nothing."""
        assert self.sinks is not None
        tile = out.shape[2] * self.num_kv_heads // self.num_heads
        sinks = self._by_row(self.sinks.float(), tile)
        new_max = torch.maximum(maximum, sinks)
        scale = torch.exp(maximum - new_max)
        return out * scale, total * scale + torch.exp(sinks - new_max)

    def _by_row(self, values: torch.Tensor, tile: int) -> torch.Tensor:
        """One value a head, [H], to the rows of a tile, [1, K, Q * G, 1]."""
        values = values.view(1, self.num_kv_heads, 1, -1).expand(1, self.num_kv_heads, tile, -1)
        return values.reshape(1, self.num_kv_heads, -1, 1)


def read_lines(kv_cache: torch.Tensor, num_lines: int, num_tiles: int) -> torch.Tensor:
    """The first ``num_tiles`` KV tiles of every cache line but the null one, [lines, S, 2 * K, D]: a slice, no gather.

    It applies to decode on a contiguous cache (``block_size=max_model_len``), whose blocks [lines * tiles, ...] are
    whole lines, and pays where most lines are in use with contexts of like length: ``GraphPolicy.choose`` takes such
    steps there, all others go tile by tile.
    """
    lines = kv_cache.view(num_lines + 1, -1, *kv_cache.shape[1:])
    return lines[1:, :num_tiles].flatten(1, 2)


def _merge(
    out: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, tree: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One level of the merge tree: nodes that share a parent are rescaled to a common maximum and added."""
    child_max = maximum[tree]
    new_max = child_max.amax(dim=1)
    scale = torch.exp(child_max - new_max.unsqueeze(1))
    return (out[tree] * scale).sum(dim=1), new_max, (total[tree] * scale).sum(dim=1)
