"""Operands of the kernels, made from an attention plan: block, offset and head are folded into row indices.

They take a handful of small int32 operations in plain torch, which the step's graph holds once for all layers of a
group. Positions that are not the request's own lead to the null block, whose contents are finite: so what other
requests left after the end of a sequence, even a NaN, is never loaded.
"""

from dataclasses import dataclass

import torch

from model_runner_base.attention.metadata import PairPlan
from neuron_runner.nki.tiling import PARTITIONS, Tiling


@dataclass
class PairOperands:
    """Operands of both kernels: P pairs, S positions of a KV tile, W rows of a pass."""

    rows: torch.Tensor
    """[P, S] int32 cache row of each position of the pair's KV tile."""
    bounds: torch.Tensor
    """[P, W] float32, the last position that each row sees. [P, 2 * W] if the plan has a first position and there is
    no window to work it out from: then the second half holds the first positions."""


@dataclass
class TileOperands(PairOperands):
    queries: torch.Tensor
    """[NT, H * Q] int32"""
    outputs: torch.Tensor
    """[NT, H * Q] int32"""
    ranges: torch.Tensor
    """[NT, 2] int32"""
    is_token: torch.Tensor
    """[C] bool: false for padding, whose output no tile writes."""


@dataclass
class DecodeOperands(PairOperands):
    queries: torch.Tensor
    """[P, H] int32"""
    tree: torch.Tensor
    """[rows of all levels, fan-in] int32"""
    level_rows: tuple[int, ...]


def tile_operands(plan: PairPlan, tiling: Tiling, window: int | None) -> TileOperands:
    """Operands of ``attend_tiles`` for a plan of chunks, in which a tile's pairs are adjacent."""
    assert plan.tile_tokens is not None and plan.tile_slots is not None
    heads, tile = tiling.num_heads, tiling.query_tile
    num_tiles, num_tokens = plan.tile_tokens.shape[0], plan.tile_slots.shape[0]
    device = plan.tile_tokens.device
    # After a tile's last token the plan names tokens of other tiles, whose slots are elsewhere.
    slot = torch.arange(num_tiles * tile, dtype=torch.int32, device=device).view(num_tiles, tile)
    is_filled = plan.tile_slots[plan.tile_tokens] == slot
    head = torch.arange(heads, dtype=torch.int32, device=device).view(1, heads, 1)
    queries = (plan.tile_tokens.unsqueeze(1) * heads + head).view(num_tiles, heads * tile)
    is_filled = is_filled.unsqueeze(1).expand(num_tiles, heads, tile).reshape(num_tiles, heads * tile)
    outputs = torch.where(is_filled, queries, num_tokens * heads)

    numbers = torch.arange(num_tiles, dtype=torch.int32, device=device).view(-1, 1)
    is_real = (plan.pair_last >= 0).view(1, -1)
    pair_tile = plan.pair_tile.view(1, -1)
    first = ((pair_tile < numbers) & is_real).sum(dim=1, dtype=torch.int32)
    count = ((pair_tile == numbers) & is_real).sum(dim=1, dtype=torch.int32)
    token = torch.arange(num_tokens, dtype=torch.int32, device=device)
    is_token = plan.tile_tokens.reshape(-1)[plan.tile_slots] == token
    return TileOperands(
        rows=_cache_rows(plan),
        bounds=_bounds(plan, tiling, window),
        queries=queries,
        outputs=outputs,
        ranges=torch.stack((first, first + count), dim=1),
        is_token=is_token,
    )


def decode_operands(plan: PairPlan, tiling: Tiling, window: int | None) -> DecodeOperands:
    """Operands of ``attend_pairs`` for a plan of decode rows, in which tile i is token i and pairs are in any order."""
    heads = tiling.num_heads
    head = torch.arange(heads, dtype=torch.int32, device=plan.pair_tile.device)
    levels = []
    for tree in plan.merge_tree:
        rows = (tree.unsqueeze(1) * heads + head.view(1, -1, 1)).view(-1, tree.shape[1])
        levels.append(torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % PARTITIONS)))
    return DecodeOperands(
        rows=_cache_rows(plan),
        bounds=_bounds(plan, tiling, window),
        queries=plan.pair_tile.view(-1, 1) * heads + head,
        tree=torch.cat(levels),
        level_rows=tuple(level.shape[0] for level in levels),
    )


def _cache_rows(plan: PairPlan) -> torch.Tensor:
    assert plan.pair_blocks is not None  # Whole cache lines are read by plain torch alone.
    position = torch.arange(plan.kv_tile, dtype=torch.int32, device=plan.pair_blocks.device)
    rows = plan.pair_blocks[:, position // plan.block_size] * plan.block_size + position % plan.block_size
    is_own = position <= plan.pair_last.view(-1, 1)
    first = plan.pair_first
    if first is not None:
        is_own = is_own & (position >= first.view(-1, 1))
    return torch.where(is_own, rows, 0)


def _bounds(plan: PairPlan, tiling: Tiling, window: int | None) -> torch.Tensor:
    ends = [plan.last] if plan.first is None or window is not None else [plan.last, plan.first]
    return torch.cat([end.repeat(1, tiling.heads_per_pass) for end in ends], dim=1).float()
