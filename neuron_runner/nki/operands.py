"""From the attention metadata to what the kernels read: the plan with block, offset and head folded into row indices.

A handful of small int32 operations in plain torch, which the step's graph holds once for all layers of a group. Rows
that are not the request's own lead to the null block, whose contents are finite: so whatever other requests left
behind a sequence, even a NaN, is never loaded.
"""

from dataclasses import dataclass

import torch

from model_runner_base.attention.paged import PagedAttentionMetadata
from neuron_runner.nki.tiling import PARTITIONS, Tiling


@dataclass
class PairOperands:
    """Of both kernels. P pairs, S KV tile, W rows of a pass."""

    rows: torch.Tensor
    """[P, S] int32 cache row of each position of the pair's KV tile."""
    bounds: torch.Tensor
    """[P, W] float32 last position that each row sees."""


@dataclass
class TileOperands(PairOperands):
    queries: torch.Tensor
    """[NT, H * Q] int32"""
    outputs: torch.Tensor
    """[NT, H * Q] int32"""
    ranges: torch.Tensor
    """[NT, 2] int32"""
    is_token: torch.Tensor
    """[T] bool: false for padding, whose output no tile writes."""


@dataclass
class DecodeOperands(PairOperands):
    queries: torch.Tensor
    """[P, H] int32"""
    tree: torch.Tensor
    """[rows of all levels, fan-in] int32"""
    level_rows: tuple[int, ...]


def tile_operands(meta: PagedAttentionMetadata, tiling: Tiling, window: int | None) -> TileOperands:
    """For ``attend_tiles``. A tile's pairs must lie side by side, as they do in any plan made from scratch."""
    assert meta.tile_tokens is not None and meta.token_slots is not None
    heads, tile = tiling.num_heads, tiling.query_tile
    num_tiles, num_tokens = meta.tile_tokens.shape[0], meta.token_slots.shape[0]
    device = meta.tile_tokens.device
    # Behind a tile's last token lie tokens of the next, whose place is not there.
    slot = torch.arange(num_tiles * tile, dtype=torch.int32, device=device).view(num_tiles, tile)
    is_filled = meta.token_slots[meta.tile_tokens] == slot
    head = torch.arange(heads, dtype=torch.int32, device=device).view(1, heads, 1)
    queries = (meta.tile_tokens.unsqueeze(1) * heads + head).view(num_tiles, heads * tile)
    is_filled = is_filled.unsqueeze(1).expand(num_tiles, heads, tile).reshape(num_tiles, heads * tile)
    outputs = torch.where(is_filled, queries, num_tokens * heads)

    numbers = torch.arange(num_tiles, dtype=torch.int32, device=device).view(-1, 1)
    is_real = (meta.pair_offset + tile > 0).view(1, -1)
    pair_tile = meta.pair_tile.view(1, -1)
    first = ((pair_tile < numbers) & is_real).sum(dim=1, dtype=torch.int32)
    count = ((pair_tile == numbers) & is_real).sum(dim=1, dtype=torch.int32)
    token = torch.arange(num_tokens, dtype=torch.int32, device=device)
    is_token = meta.tile_tokens.reshape(-1)[meta.token_slots] == token
    return TileOperands(
        rows=_cache_rows(meta, window),
        bounds=_bounds(meta, tiling),
        queries=queries,
        outputs=outputs,
        ranges=torch.stack((first, first + count), dim=1),
        is_token=is_token,
    )


def decode_operands(meta: PagedAttentionMetadata, tiling: Tiling, window: int | None) -> DecodeOperands:
    """For ``attend_pairs``: tile i is token i, pairs lie in any order."""
    heads = tiling.num_heads
    head = torch.arange(heads, dtype=torch.int32, device=meta.pair_tile.device)
    levels = []
    for tree in meta.merge_tree:
        rows = (tree.unsqueeze(1) * heads + head.view(1, -1, 1)).view(-1, tree.shape[1])
        levels.append(torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % PARTITIONS)))
    return DecodeOperands(
        rows=_cache_rows(meta, window),
        bounds=_bounds(meta, tiling),
        queries=meta.pair_tile.view(-1, 1) * heads + head,
        tree=torch.cat(levels),
        level_rows=tuple(level.shape[0] for level in levels),
    )


def _cache_rows(meta: PagedAttentionMetadata, window: int | None) -> torch.Tensor:
    block_size = meta.geometry.block_size
    assert meta.pair_blocks is not None  # Whole cache lines are read by plain torch alone.
    position = torch.arange(meta.geometry.kv_tile, dtype=torch.int32, device=meta.pair_blocks.device)
    rows = meta.pair_blocks[:, position // block_size] * block_size + position % block_size
    is_own = position <= meta.pair_last.view(-1, 1)
    if window is not None:
        is_own = is_own & (meta.pair_offset.view(-1, 1) - position < window)
    return torch.where(is_own, rows, 0)


def _bounds(meta: PagedAttentionMetadata, tiling: Tiling) -> torch.Tensor:
    row = torch.arange(tiling.rows, dtype=torch.int32, device=meta.pair_offset.device)
    return (meta.pair_offset.view(-1, 1) + row % tiling.query_tile).float()
