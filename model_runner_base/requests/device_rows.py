"""What the device knows of every row before the host does: the last tokens, and how far the row truly is.

The host plans with the scheduler's numbers, which are bounds. A step's graph reads the truth here, so the host never
waits for a token to launch the next step. Wherever a packed number may be known to the device alone, a negative one,
``-(row + 1)``, stands for "what the device knows of that row".
"""

import torch

from model_runner_base.device_ops import DeviceOps


class DeviceRows:
    """Two tensors with a row for each request row, and one more, the last, for padding.

    ``tokens`` [rows + 1, K] int32: the token that was sampled last, behind which drafts would stand (K = 1: none).
    ``computed`` [rows + 1] int32: tokens in the cache, once that token's step has run: its position.

    A graph that updates them may replace the tensors; they are read through ``tensors`` only.
    """

    def __init__(self, max_num_reqs: int, device_ops: DeviceOps, num_tokens: int = 1) -> None:
        self.tensors = [
            device_ops.zeros((max_num_reqs + 1, num_tokens), torch.int32),
            device_ops.zeros((max_num_reqs + 1,), torch.int32),
        ]


def known_or(values: torch.Tensor, on_device: torch.Tensor) -> torch.Tensor:
    """``values`` [N] int32 with ``on_device`` [rows] in place of each negative one. Traceable."""
    return torch.where(values < 0, on_device[(-values - 1).clamp(min=0)], values)


def commit(rows: list[torch.Tensor], slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Records what was sampled, in place. Traceable.

    Args:
        rows: the tensors of ``DeviceRows``.
        slots: [2, S] int32, the row of each token (the padding row where nothing is to be recorded) and its position.
        tokens: [S] int32.
    """
    last, computed = rows
    last.index_put_((slots[0], torch.zeros_like(slots[0])), tokens)
    computed.index_put_((slots[0],), slots[1])
