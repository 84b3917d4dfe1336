"""What the device knows of every row before the host does: the last tokens, and how far the row truly is.

The host plans with the scheduler's numbers, which are bounds. A step's graph reads the truth here, so the host never
waits for a token to launch the next step. Wherever a packed number may be known to the device alone, a negative one,
``-(row + 1)``, stands for "what the device knows of that row".
"""

from collections.abc import MutableSequence, Sequence

import torch

from model_runner_base.device_ops import DeviceOps

NO_TOKEN = -2
"""A sampled token that no rule allows. Its request ends with an error. (-1 is what counts for nothing.)"""


class DeviceRows:
    """Tensors with a row for each request row, and one more, the last, for padding.

    ``tokens`` [rows + 1, K] int32: the token that was sampled last, and the K - 1 drafts behind it (K = 1: none), -1
    where none was made.
    ``computed`` [rows + 1] int32: tokens in the cache, once that token's step has run: its position.
    ``recent`` [rows + 1, K + 1] int32, where there are drafts: the tokens that the last step yielded, -1 behind them;
    in the last column the token that was the last before that step.

    A graph that updates them may replace the tensors; they are read through ``tensors`` only.
    """

    def __init__(self, max_num_reqs: int, device_ops: DeviceOps, num_tokens: int = 1) -> None:
        self.num_tokens = num_tokens
        """K"""
        self.tensors: MutableSequence[torch.Tensor] = [
            device_ops.zeros((max_num_reqs + 1, num_tokens), torch.int32),
            device_ops.zeros((max_num_reqs + 1,), torch.int32),
        ]
        if num_tokens > 1:
            self.tensors = [*self.tensors, device_ops.zeros((max_num_reqs + 1, num_tokens + 1), torch.int32)]

    @property
    def yielded(self) -> torch.Tensor:
        """[rows + 1, ...] whose first K columns are what the last step of each row yielded, -1 behind it."""
        return self.tensors[0 if self.num_tokens == 1 else 2]


def known_or(values: torch.Tensor, on_device: torch.Tensor) -> torch.Tensor:
    """``values`` [N] int32 with ``on_device`` [rows] in place of each negative one. Traceable."""
    return torch.where(values < 0, on_device[(-values - 1).clamp(min=0)], values)


def commit(rows: Sequence[torch.Tensor], slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Records what was sampled, in place; returns what of it counts, [S] int32, -1 elsewhere. Traceable.

    Args:
        rows: the tensors of ``DeviceRows``.
        slots: [2, S] or, where drafts are verified, [3, S] int32 (``ModelCall.sample_slots``): the row of each token
            (the padding row where nothing is to be recorded), its position, the draft for that position or -1.
        tokens: [S] int32. Of NO_TOKEN the row keeps token 0, so that a step that is launched already can run.
    """
    if slots.shape[0] == 3:
        return _verify(rows, slots, tokens)
    last, computed = rows
    last.index_put_((slots[0], torch.zeros_like(slots[0])), tokens.clamp(min=0))
    computed.index_put_((slots[0],), slots[1])
    return tokens


def _verify(rows: Sequence[torch.Tensor], slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A request's tokens count up to the first that is not the draft that stands there: what comes behind was sampled
    in a context that is not the request's.

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
    # What the step yielded; of each row it is written anew.
    begins = torch.where(is_first, row, padding_row)
    nothing = torch.full((1, num_tokens), -1, dtype=torch.int32, device=row.device).expand(row.shape[0], -1)
    recent.index_put_((begins,), torch.cat((nothing, last[begins, :1]), dim=1))
    known = tokens.clamp(min=0)
    recent.index_put_((torch.where(counts, row, padding_row), place), known)
    # Where it is now; drafts come later.
    ends = torch.where(counts & ~is_right, row, padding_row)
    last.index_put_((ends,), torch.cat((known.unsqueeze(1), nothing[:, 1:]), dim=1))
    computed.index_put_((ends,), position)
    return torch.where(counts, tokens, -1)


def _shifted(values: torch.Tensor) -> torch.Tensor:
    """Each place's is that of the place before; zero in front."""
    return torch.cat((torch.zeros_like(values[:1]), values[:-1]))
