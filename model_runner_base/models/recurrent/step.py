"""Step of recurrent layers: which state each decode row and each chunk tile reads and writes.

The scheduler gives out the indices of states. Index 0 belongs to no request, and padding writes there. A request reads
its source and writes its destination. They are one state, unless prefixes are kept or drafts are verified
(caches/states.py). Several requests may have one source, but each has a destination of its own. A decode row's tokens
are computed in turn, and each has a source and a destination. Tokens of chunks lie in tiles (step/call.py),
and a request's tiles follow each other, so a tile is its request's first or last one where its neighbour has another
destination.

Example: tiles of 64 tokens; "a" has 100 tokens of its prompt and state 3, "b" has 20 tokens and state 1; one tile of
padding. ``states`` of the tiles are [3, 3, 1, 0], ``is_first`` [yes, no, yes, yes], ``written`` [0, 3, 1, 0].
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from model_runner_base.step.call import ChunkTiles


class TileSteps(NamedTuple):
    """Chunk tiles of a step: NT tiles of Q tokens, C tokens of chunks.

    Fields and no properties, which Dynamo does not read off a tuple.
    """

    states: torch.Tensor
    """[NT] int32: index of the destination of each tile's request; 0: padding."""
    sources: torch.Tensor
    """[NT] int32: index of the source of each tile's request."""
    written: torch.Tensor
    """[NT] int32: index that the state after each tile goes to; 0 unless the tile is its request's last."""
    has_state: torch.Tensor
    """[NT] bool: whether the request had tokens before this step."""
    is_first: torch.Tensor
    """[NT] bool: whether the tile is its request's first in this step."""
    begins: torch.Tensor
    """[NT] int32: index among the chunks' tokens of the request's first token in this step."""
    ends: torch.Tensor
    """[NT] int32: index of each tile's last token."""
    tokens: torch.Tensor
    """[NT, Q] int32: indices of each tile's tokens."""
    is_token: torch.Tensor
    """[NT, Q] bool: not padding."""
    slots: torch.Tensor
    """[C] int32: where in the flattened tiles each token lies."""
    tile_of: torch.Tensor
    """[C] int32: each token's tile."""

    @classmethod
    def of(cls, tiles: ChunkTiles, states: torch.Tensor, sources: torch.Tensor) -> "TileSteps":
        """Tiles whose requests have the destinations ``states`` [NT] and the ``sources`` [NT]."""
        starts, none = tiles.starts[:-1], torch.full_like(states[:1], -1)
        is_first = states != torch.cat((none, states[:-1]))
        is_last = states != torch.cat((states[1:], none))
        tile = torch.arange(states.shape[0], dtype=torch.int32, device=states.device)
        # Starts rise with the tiles: the request's first token is the latest start of a first tile up to here.
        begins = torch.where(is_first & (tile <= tile.unsqueeze(1)), starts, 0).amax(dim=1)
        return cls(
            states=states,
            sources=sources,
            written=torch.where(is_last, states, 0),
            has_state=tiles.first - (starts - begins) > 0,
            is_first=is_first,
            begins=begins,
            ends=tiles.starts[1:] - 1,
            tokens=tiles.tokens,
            is_token=tiles.is_token,
            slots=tiles.slots,
            tile_of=tiles.slots // tiles.query,
        )

    def pieces(self, size: int) -> Iterator["TileSteps"]:
        """Tiles in turn, ``size`` at a time, each piece as if it were the step's tiles.

        A request that a piece does not end leaves its state in its destination, with which the next piece begins. The
        outputs of a piece are by slot of its tiles, not by token.
        """
        count, query = self.tokens.shape
        for start in range(0, count, size):
            of_piece = slice(start, min(start + size, count))
            states, is_first, tokens = self.states[of_piece], self.is_first[of_piece], self.tokens[of_piece]
            tile = torch.arange(states.shape[0], dtype=torch.int32, device=states.device)
            goes_on = (tile == 0) & ~is_first
            slots = torch.arange(tokens.shape[0] * query, dtype=torch.int32, device=states.device)
            yield TileSteps(
                states=states,
                sources=torch.where(goes_on, states, self.sources[of_piece]),
                written=torch.where(tile == tile.shape[0] - 1, states, self.written[of_piece]),
                has_state=self.has_state[of_piece] | goes_on,
                is_first=is_first | goes_on,
                begins=self.begins[of_piece],
                ends=self.ends[of_piece],
                tokens=tokens,
                is_token=self.is_token[of_piece],
                slots=slots,
                tile_of=slots // query,
            )

    def load(self, states: torch.Tensor) -> torch.Tensor:
        """[NT, ...] the states of the tiles' requests before this step; zeros for a request that begins in it."""
        return load(states, self.sources, self.has_state)

    def tiled(self, values: torch.Tensor) -> torch.Tensor:
        """[NT, Q, ...] values of tokens [C, ...] in tiles, zero where a tile has no token."""
        is_token = self.is_token.view(*self.is_token.shape, *[1] * (values.dim() - 1))
        return torch.where(is_token, values[self.tokens], 0)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """[C, ...] values of tokens, from those in tiles [NT, Q, ...]."""
        return values.flatten(0, 1)[self.slots]


class DecodeSteps(NamedTuple):
    """One token of each of R decode rows."""

    states: torch.Tensor
    """[R] int32: index of each row's destination, which the row overwrites; 0: padding."""
    sources: torch.Tensor
    """[R] int32: index of each row's source, which the row reads."""
    has_state: torch.Tensor
    """[R] bool: whether the request had tokens before this one."""

    def load(self, states: torch.Tensor) -> torch.Tensor:
        """[R, ...] the rows' states; zeros for a request that begins with this token."""
        return load(states, self.sources, self.has_state)


Values = tuple[torch.Tensor, ...]


class RecurrentStep(NamedTuple):
    """States of a step: those of decode rows, then those of the chunks' tiles."""

    rows: tuple[DecodeSteps, ...]
    """Tokens of the decode rows: their first ones, their second ones where drafts are verified, and so on."""
    tiles: TileSteps | None
    """Tiles of the chunks; None in a step of decode rows alone."""

    def run(
        self,
        values: Values,
        run_rows: Callable[[Values, DecodeSteps], torch.Tensor],
        run_tiles: Callable[[Values, TileSteps], torch.Tensor],
    ) -> torch.Tensor:
        """[T, ...] outputs of all tokens, from values [T, ...]: of decode rows, row after row, then of chunks."""
        count = len(self.rows)
        end = count * self.rows[0].states.shape[0]
        # A token's state is that after the token before it, so the rows' tokens are run one after another.
        outs = [run_rows(tuple([v[at:end:count] for v in values]), row) for at, row in enumerate(self.rows)]
        out = outs[0] if count == 1 else torch.stack(outs, dim=1).flatten(0, 1)
        if self.tiles is None:
            return out
        return torch.cat((out, run_tiles(tuple([v[end:] for v in values]), self.tiles)))


def load(states: torch.Tensor, indices: torch.Tensor, has_state: torch.Tensor) -> torch.Tensor:
    """[N, ...] ``states`` at ``indices`` [N]; zeros where ``has_state`` [N] is False, whatever lies there."""
    found = states[indices]
    return torch.where(has_state.view(-1, *[1] * (found.dim() - 1)), found, 0)


def store(states: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrites ``states`` at ``indices`` [N] with ``values`` [N, ...]; what belongs to no request goes to index 0."""
    states.index_put_((indices,), values.to(states.dtype))
