"""Tokens of a step on the device: positions of decode rows, and tiles of chunks."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from model_runner_base.step.device_rows import known_or

STARTS, LENGTHS = "decode_starts", "decode_lengths"


class DecodeRows(NamedTuple):
    """R decode rows with Q places for tokens each.

    A row has Q places for tokens at consecutive positions, and its tokens fill the first ones. Q is 1, or 1 + k where k
    drafts are verified. The host packs a row so that it is right for every position where the row may turn out to be;
    the graph reads the true position from ``DeviceRows``.
    """

    positions: torch.Tensor
    """[R, Q] int32 position of each place."""
    is_token: torch.Tensor | None = None
    """[R, Q] bool; None: every row has Q tokens, and those of padding rows do no harm."""

    @classmethod
    def of(cls, arrays: Mapping[str, torch.Tensor], computed: torch.Tensor, query: int) -> "DecodeRows":
        """Rows of a step, from its sections; ``computed`` as ``ModelCall`` has it."""
        starts = known_or(arrays[STARTS], computed).unsqueeze(1)
        if query == 1:
            return cls(starts)
        index = torch.arange(query, dtype=torch.int32, device=starts.device)
        return cls(starts + index, index < arrays[LENGTHS].unsqueeze(1))


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
