"""Decode rows on the device: the positions of their tokens.

A row has Q places for tokens at consecutive positions, and its tokens fill the first ones. Q is 1, or 1 + k where k
drafts are verified. The host packs a row so that it is right for every position where the row may turn out to be; the
graph reads the true position from ``DeviceRows``.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from model_runner_base.step.device_rows import known_or

STARTS, LENGTHS = "decode_starts", "decode_lengths"


class DecodeRows(NamedTuple):
    """R decode rows with Q places for tokens each."""

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
