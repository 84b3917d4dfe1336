"""Sampling parameters of every request row, kept on the device and copied only when a row changes."""

import random
from enum import IntEnum

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from model_runner_base.device_ops import DeviceOps

GREEDY_TEMPERATURE = 1e-5
"""Temperature below which a request is greedy, as in vLLM."""


class SamplingMode(IntEnum):
    """Sampling work that a request needs, from cheap to expensive; a batch uses the most expensive of its requests."""

    GREEDY = 0
    RANDOM = 1
    """Temperature, min-p, seeds."""
    SORTED = 2
    """Also top-k or top-p, which sort the vocabulary."""


class SamplingStates:
    """Two tables with a row for each request row, and a last greedy row for padding.

    Floats [rows, 3]: temperature, top-p, min-p. Ints [rows, 3]: top-k (the vocabulary's size if off), low and high half
    of the seed. A request without a seed gets one from a generator that starts at ``seed``. Unless ``applies_min_p``,
    min-p stays off, because a logits processor applies it.
    """

    def __init__(
        self, max_num_reqs: int, vocab_size: int, seed: int, device_ops: DeviceOps, applies_min_p: bool = True
    ) -> None:
        self.vocab_size = vocab_size
        self.applies_min_p = applies_min_p
        self.device_ops = device_ops
        self.floats = np.zeros((max_num_reqs + 1, 3), np.float32)
        self.ints = np.zeros((max_num_reqs + 1, 3), np.int32)
        self.ints[:, 0] = vocab_size
        self.floats[:, 1] = 1.0
        self.modes = np.zeros(max_num_reqs + 1, np.int8)
        self._greedy = (0.0, 1.0, 0.0), (vocab_size, 0, 0)
        self._values = [self._greedy] * max_num_reqs
        """Contents of both tables by row, to see whether a new request changes them."""
        self._random = random.Random(seed)
        self._device: tuple[torch.Tensor, torch.Tensor] | None = None

    def admit(self, row: int, params: SamplingParams, seed: int) -> None:
        # Other parameters do not matter to a greedy row. All greedy rows are alike, so a new one seldom changes tables.
        mode, values = SamplingMode.GREEDY, self._greedy
        if params.temperature >= GREEDY_TEMPERATURE:
            top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
            is_sorted = params.top_p < 1.0 or top_k < self.vocab_size
            mode = SamplingMode.SORTED if is_sorted else SamplingMode.RANDOM
            low, high = np.array([seed & (1 << 64) - 1], np.uint64).view(np.int32).tolist()
            min_p = params.min_p if self.applies_min_p else 0.0
            values = (params.temperature, params.top_p, min_p), (top_k, low, high)
        self.modes[row] = mode
        if self._values[row] != values:
            self._values[row] = values
            self.floats[row], self.ints[row] = values
            self._device = None

    def draw_seed(self) -> int:
        return self._random.getrandbits(63)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tables on the device."""
        if self._device is None:
            self._device = self.device_ops.to_device(self.floats), self.device_ops.to_device(self.ints)
        return self._device
