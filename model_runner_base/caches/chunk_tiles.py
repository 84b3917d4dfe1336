"""The chunk tiles of a step on the device: which tokens each holds, and what the graph works out of where they are."""

from typing import NamedTuple

import torch

from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.plan import PairGeometry
from model_runner_base.attention.sight import Sight
from model_runner_base.step.call import ModelCall


class ChunkTiles(NamedTuple):
    """NT tiles, Q tokens a tile, C tokens of chunks."""

    tokens: torch.Tensor
    """[NT, Q] indices among the chunks' tokens, any behind a tile's last."""
    is_token: torch.Tensor
    """[NT, Q] bool"""
    slots: torch.Tensor
    """[C] where in the flattened tiles each token lies."""
    positions: torch.Tensor
    """[C]"""
    starts: torch.Tensor
    """[NT + 1] index of each tile's first token among the chunks' tokens; a tile ends where the next one begins."""
    first: torch.Tensor
    """[NT] position of each tile's first token."""
    length: torch.Tensor
    """[NT] tokens."""
    is_real: torch.Tensor
    """[C] bool: not padding."""
    query: int

    @classmethod
    def of(cls, call: ModelCall, query: int) -> "ChunkTiles":
        arrays = call.arrays
        starts, first, slots = (arrays[f"chunk_{name}"] for name in ("tile_starts", "tile_positions", "token_slots"))
        num_tokens, device = slots.shape[0], slots.device
        index = torch.arange(query, dtype=torch.int32, device=device)
        length = starts[1:] - starts[:-1]
        return cls(
            tokens=(starts[:-1, None] + index).clamp(max=num_tokens - 1),
            is_token=index < length.unsqueeze(1),
            slots=slots,
            positions=first[slots // query] + slots % query,
            starts=starts,
            first=first,
            length=length,
            is_real=torch.arange(num_tokens, dtype=torch.int32, device=device) < starts[-1],
            query=query,
        )

    def last_seen(self, sight: Sight, positions: torch.Tensor) -> torch.Tensor:
        """The last position that tokens of each tile at ``positions`` [NT] or [NT, N] see."""
        if not sight.is_whole:
            return positions
        lengths = self.request_lengths().view(-1, *[1] * (positions.dim() - 1))
        return sight.last_of_whole(positions, lengths)

    def request_lengths(self) -> torch.Tensor:
        """[NT] tokens of each tile's request, where all are whole: the next tile at position 0 is another request's."""
        tile = torch.arange(self.first.shape[0], dtype=torch.int32, device=self.first.device)
        is_next = (self.first == 0) & (tile > tile.unsqueeze(1))
        end = torch.where(is_next, self.starts[:-1], self.starts[-1]).amin(dim=1)
        return self.first + end - self.starts[:-1]

    def own_blocks(self, last_pair: torch.Tensor, plan: PairPlan, geometry: PairGeometry) -> torch.Tensor:
        """[C] the block that each token's key goes to; a tile's pairs lie side by side in the order of their keys."""
        tile = self.slots // self.query
        assert plan.pair_start is not None and plan.pair_blocks is not None
        last_kv_tile = plan.pair_start[last_pair] // geometry.kv_tile
        pair = last_pair[tile] - (last_kv_tile[tile] - self.positions // geometry.kv_tile)
        block = plan.pair_blocks[pair.clamp(min=0), self.positions % geometry.kv_tile // geometry.block_size]
        return torch.where(self.is_real, block, 0)
