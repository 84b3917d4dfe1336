"""Key range: the one interval ``[first, last]`` of key positions that a token sees.

- Causal attention: ``[0, position]``.
- A sliding window of w: ``[position - w + 1, position]``.
- Chunks of c, as in Llama 4's local layers: ``[position // c * c, position]``.
- Encoder-only layers, whose requests are whole in one step: ``[0, length - 1]``. With a window of w to both sides:
  ``[position - w + 1, position + w - 1]``.

The graph computes both ends from positions and lengths, so neither is sent.

Example: with a window of 4 the token at position 6 sees keys 3 to 6; with chunks of 4 it sees keys 4 to 6. Of a whole
request of 8 tokens it sees keys 0 to 7, with a window of 4 keys 3 to 7.
"""

from typing import NamedTuple

import torch


class KeyRange(NamedTuple):
    """Rule for the keys that the tokens of a layer see."""

    window: int = 0
    """Size of the window: a token sees itself and ``window - 1`` tokens before it; 0: no window."""
    chunk: int = 0
    """Number of positions in a chunk: a token sees no key of an earlier chunk; 0: no chunks."""
    is_whole: bool = False
    """Whether a token also sees keys after it: all of its request, or ``window - 1`` of them."""

    def first(self, positions: torch.Tensor) -> torch.Tensor | None:
        """First position that tokens at ``positions`` see, of the same shape; None if it is 0 for all."""
        if self.window:
            return (positions - (self.window - 1)).clamp(min=0)
        if self.chunk:
            # A remainder is exact, while a compiler may divide integers as floats.
            return positions - positions % self.chunk
        return None

    def last_of_whole(self, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Last position that tokens at ``positions`` see of whole requests; ``lengths`` broadcast to ``positions``."""
        last = lengths - 1
        return torch.minimum(last, positions + (self.window - 1)) if self.window else last.expand_as(positions)


CAUSAL = KeyRange()
"""Rule by which a token sees itself and everything before it."""
