"""What a token sees: one interval ``[first, last]`` of key positions.

Causal attention: ``[0, position]``. A sliding window of w: ``[position - w + 1, position]``. Chunks of c, as Llama 4's
local layers have them: ``[position // c * c, position]``. A request that is whole in the step may be seen as a whole,
as encoder-only layers have it: ``[0, length - 1]``; with a window of w, as far to both sides, ``[position - w + 1,
position + w - 1]``. Both ends follow from positions and lengths, so the graph works them out; nothing of them is sent.

Example: with a window of 4 the token at position 6 sees keys 3 to 6; with chunks of 4 it sees keys 4 to 6. Of a whole
request of 8 tokens it sees keys 0 to 7, with a window of 4 keys 3 to 7.
"""

from typing import NamedTuple

import torch


class KeyRange(NamedTuple):
    """How far the tokens of a layer see."""

    window: int = 0
    """A token sees itself and ``window - 1`` tokens before it; 0: no window."""
    chunk: int = 0
    """A token sees no key of an earlier chunk of so many positions; 0: no chunks."""
    is_whole: bool = False
    """A token sees the keys behind it too, all of its request or as many as the window shows before it."""

    def first(self, positions: torch.Tensor) -> torch.Tensor | None:
        """The first position that tokens at ``positions`` see, of the same shape; None if it is 0 for all."""
        if self.window:
            return (positions - (self.window - 1)).clamp(min=0)
        if self.chunk:
            # A remainder is exact, while a compiler may divide integers as floats.
            return positions - positions % self.chunk
        return None

    def last_of_whole(self, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The last position that tokens at ``positions`` see of whole requests, of ``lengths`` that broadcast."""
        last = lengths - 1
        return torch.minimum(last, positions + (self.window - 1)) if self.window else last.expand_as(positions)


CAUSAL = KeyRange()
"""A token sees itself and everything before it."""
