"""Rows on the device: each row's last tokens and exact progress, which the device knows before the host does.

The host plans with the scheduler's numbers, which are bounds. A step's graph reads the exact ones here, so the host
never waits for a token before it launches the next step. A packed number that only the device may know is replaced by a
negative one: ``-(row + 1)`` means "the device's number for that row".
"""

from collections.abc import MutableSequence, Sequence

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.graph_policy import WrapFunction

NO_TOKEN = -2
"""Sampled token of a row for which the rules allow no token. Its request ends with an error. (-1 is a token that does
not count.)"""


class DeviceRows:
    """Tensors with a row for each request row, and a last one for padding.

    ``tokens`` [rows + 1, K] int32: the token that was sampled last, and the K - 1 drafts after it (K = 1: none), -1
    where none was made.
    ``computed`` [rows + 1] int32: position of that token, which is the number of tokens in the cache before it.
    ``recent`` [rows + 1, K + 1] int32, where there are drafts: the tokens that the last step yielded, and -1 after
    them; the last column has the last token before that step.

    A graph that updates the tensors may replace them, so they are read through ``tensors`` only.
    """

    def __init__(self, max_num_reqs: int, device_ops: DeviceOps, num_tokens: int = 1) -> None:
        self.num_tokens = num_tokens
        """K, the last token and its drafts."""
        self.tensors: MutableSequence[torch.Tensor] = [
            device_ops.zeros((max_num_reqs + 1, num_tokens), torch.int32),
            device_ops.zeros((max_num_reqs + 1,), torch.int32),
        ]
        if num_tokens > 1:
            self.tensors = [*self.tensors, device_ops.zeros((max_num_reqs + 1, num_tokens + 1), torch.int32)]

    @property
    def yielded(self) -> torch.Tensor:
        """[rows + 1, ...] int32; the first K columns are the tokens that each row's last step yielded, and -1 after
        them."""
        return self.tensors[0 if self.num_tokens == 1 else 2]


def known_or(values: torch.Tensor, on_device: torch.Tensor) -> torch.Tensor:
    """``values`` [N] int32, where each negative value ``-(i + 1)`` is replaced by ``on_device[i]``. Traceable."""
    return torch.where(values < 0, on_device[(-values - 1).clamp(min=0)], values)


def commit(rows: Sequence[torch.Tensor], slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Records sampled tokens in place; returns those that count, [S] int32, and -1 for others. Traceable.

    Args:
        rows: the tensors of ``DeviceRows``.
        slots: [2, S] or, where drafts are verified, [3, S] int32 (``ModelCall.sample_slots``): the row of each token
            (the padding row where nothing is to be recorded), its position, the draft for that position or -1.
        tokens: [S] int32. For NO_TOKEN the row records token 0, so that a step that is launched already can run.
    """
    if slots.shape[0] == 3:
        return _verify(rows, slots, tokens)
    last, computed = rows
    last.index_put_((slots[0], torch.zeros_like(slots[0])), tokens.clamp(min=0))
    computed.index_put_((slots[0],), slots[1])
    return tokens


class ReceivedTokens:
    """Recorder of tokens that were sampled elsewhere, such as on the last stage of a pipeline.

    A row's progress does not depend on where its token was drawn: the rows are as if this rank had sampled it.
    """

    def __init__(self, rows: DeviceRows, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        self._rows = rows
        self._record = wrap(_record, rows.tensors)
        self._device_ops = device_ops

    def record(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Records ``tokens`` [S] int32 in ``rows`` [S], the padding row for tokens that do not count; ``positions`` [S]
        are those that the tokens have."""
        slots = np.stack((rows, positions)).astype(np.int32)
        self._record(*map(self._device_ops.to_device, (slots, tokens)), *self._rows.tensors)


def _record(slots: torch.Tensor, tokens: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    return commit(rows, slots, tokens)


def _verify(rows: Sequence[torch.Tensor], slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Records a request's tokens up to the first one that differs from its draft.

    Later tokens were sampled after a wrong draft, so they do not count.

    Example: drafts 5, 9, 4 of a row; 5, 9, 7, 2 are sampled. 5, 9, 7 count, and 7 is the row's last token.
    """
    last, computed, recent = rows
    row, position, draft = slots
    padding_row, num_tokens = last.shape[0] - 1, last.shape[1]
    is_right = tokens == draft
    is_first = torch.cat((row[:1] == row[:1], row[1:] != row[:-1]))
    counts, place = is_first, torch.zeros_like(row)
    for _ in range(num_tokens - 1):
        follows = _shifted(counts & is_right)
        place = torch.where(follows & ~is_first, _shifted(place) + 1, 0)
        counts = is_first | follows
    counts = counts & (row != padding_row)
    # Each row's ``recent`` is written anew: first no tokens and the last one before the step, then what the step
    # yielded.
    begins = torch.where(is_first, row, padding_row)
    nothing = torch.full((1, num_tokens), -1, dtype=torch.int32, device=row.device).expand(row.shape[0], -1)
    recent.index_put_((begins,), torch.cat((nothing, last[begins, :1]), dim=1))
    known = tokens.clamp(min=0)
    recent.index_put_((torch.where(counts, row, padding_row), place), known)
    # The last token that counts, and its position; drafts come later.
    ends = torch.where(counts & ~is_right, row, padding_row)
    last.index_put_((ends,), torch.cat((known.unsqueeze(1), nothing[:, 1:]), dim=1))
    computed.index_put_((ends,), position)
    return torch.where(counts, tokens, -1)


def _shifted(values: torch.Tensor) -> torch.Tensor:
    """``values`` moved by one place to the back, with a zero in front."""
    return torch.cat((torch.zeros_like(values[:1]), values[:-1]))
