"""Decode rows on the device: where their tokens are.

A row has Q tokens at consecutive positions, of which the first ones count. Q is 1, or 1 + k where k drafts are
verified. The host packs a row for every position that it may turn out to be at; the graph takes the positions
themselves from ``DeviceRows``.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from model_runner_base.requests.device_rows import known_or

STARTS, LENGTHS = "decode_starts", "decode_lengths"


class DecodeRows(NamedTuple):
    """R rows, Q tokens a row."""

    positions: torch.Tensor
    """[R, Q]"""
    is_token: torch.Tensor | None = None
    """[R, Q] bool; None: every row has Q, and what padding rows have does no harm."""

    @classmethod
    def of(cls, arrays: Mapping[str, torch.Tensor], computed: torch.Tensor, query: int) -> "DecodeRows":
        """Rows of a step, from its sections; ``computed`` as ``ModelCall`` has it."""
        starts = known_or(arrays[STARTS], computed).unsqueeze(1)
        if query == 1:
            return cls(starts)
        index = torch.arange(query, dtype=torch.int32, device=starts.device)
        return cls(starts + index, index < arrays[LENGTHS].unsqueeze(1))
