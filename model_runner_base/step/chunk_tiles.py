"""Chunk tiles of a step on the device: which tokens each holds, and where they are."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

TILE_STARTS, TILE_POSITIONS, TOKEN_SLOTS = "chunk_tile_starts", "chunk_tile_positions", "chunk_token_slots"


class ChunkTiles(NamedTuple):
    """NT chunk tiles with Q places for tokens each; C tokens of chunks in all."""

    tokens: torch.Tensor
    """[NT, Q] indices among the chunks' tokens; arbitrary after a tile's last token."""
    is_token: torch.Tensor
    """[NT, Q] bool: whether each place of a tile holds a token."""
    slots: torch.Tensor
    """[C] place of each token in the flattened tiles."""
    positions: torch.Tensor
    """[C] position of each token."""
    starts: torch.Tensor
    """[NT + 1] index of each tile's first token among the chunks' tokens; a tile ends where the next one begins."""
    first: torch.Tensor
    """[NT] position of each tile's first token."""
    length: torch.Tensor
    """[NT] number of tokens."""
    is_real: torch.Tensor
    """[C] bool: whether each token is real, and not padding."""
    query: int

    @classmethod
    def of(cls, arrays: Mapping[str, torch.Tensor], query: int) -> "ChunkTiles":
        """Tiles of a mixed step, from its sections."""
        starts, first, slots = arrays[TILE_STARTS], arrays[TILE_POSITIONS], arrays[TOKEN_SLOTS]
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

    def request_lengths(self) -> torch.Tensor:
        """[NT] number of tokens of each tile's request, if all requests are whole in the step.

        A tile at position 0 then is the first of the next request.
        """
        tile = torch.arange(self.first.shape[0], dtype=torch.int32, device=self.first.device)
        is_next = (self.first == 0) & (tile > tile.unsqueeze(1))
        end = torch.where(is_next, self.starts[:-1], self.starts[-1]).amin(dim=1)
        return self.first + end - self.starts[:-1]
