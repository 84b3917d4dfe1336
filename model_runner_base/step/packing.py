"""The packed buffer: everything that a step sends to the device, in one copy.

Every int32 array that the step's graph reads lies in one flat buffer, section after section, so that a step costs one
host-to-device copy whatever its features are. The graph takes the buffer apart again by the same section list. A step
that repeats the last one sends the entries of the buffer that changed, and nothing else; the graph writes them to the
buffer that lies on the device already.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.sizes import StepSize

Array = TypeVar("Array", np.ndarray, torch.Tensor)


class Section(NamedTuple):
    """One array in the packed buffer."""

    name: str
    shape: tuple[int, ...]


class Entries:
    """Changes to a packed buffer of ``length`` numbers: each a place in the buffer, and what is to stand there.

    ``array`` [2, E] int32 has room for E of them; what is left names the last place of the buffer, which nobody reads.
    """

    def __init__(self, length: int, capacity: int) -> None:
        self._nowhere = length - 1
        self.array = np.zeros((2, capacity), np.int32)
        self.count = np.zeros(1, np.int64)
        """[1] how many there are: an array, for compiled loops; larger than E if there was no room for all."""
        self.capacity = capacity
        self._num_written = 0
        """How many places of the array may name something."""
        self.array[0] = self._nowhere

    def clear(self) -> None:
        """A new step's begin."""
        self.count[0] = 0

    def drop(self) -> None:
        """They are not sent: any of the array's may name something."""
        self._num_written = self.capacity

    def finish(self, count: int) -> None:
        """What an earlier step has left behind these goes nowhere."""
        if count < self._num_written:
            self.array[0, count : self._num_written] = self._nowhere
        self._num_written = count


class PackedStep:
    """The packed buffer at one size, on both sides."""

    def __init__(self, size: StepSize, sections: Sequence[Section], device_ops: DeviceOps) -> None:
        self.size = size
        self.sections = sections
        self._device_ops = device_ops
        self.buffer = np.zeros(sum(prod(section.shape) for section in sections) + 1, np.int32)
        self.views = unpack(self.buffer, sections)
        """A writable view of each section, with what the last step of this size left there."""
        self.offsets = dict(zip(self.views, offsets_of(sections), strict=True))
        """Where each section begins in the buffer."""
        self.entries = Entries(len(self.buffer), capacity=16 + size.num_reqs // 2)
        self._sent: torch.Tensor | None = None
        self._sent_entries: torch.Tensor | None = None
        self._no_entries: torch.Tensor | None = None
        self.on_device: torch.Tensor
        """The buffer there; after a step that repeats another, as that one's graph left it."""
        self.entries_on_device: torch.Tensor
        """[2, E] int32, that the next graph is to write to it."""
        self.is_whole = False
        """Whether all of the buffer was sent last."""

    def send(self) -> None:
        """All of the buffer."""
        if self._no_entries is None:
            self._no_entries = self._device_ops.to_device(self.entries.array)
        self._sent = self.on_device = self._device_ops.to_device(self.buffer, self._sent)
        self.entries_on_device = self._no_entries
        self.is_whole = True
        self.entries.drop()

    def send_entries(self) -> None:
        """What changed; all of the buffer, if that is too much."""
        entries = self.entries
        count = int(entries.count[0])
        if count > entries.capacity:
            self.send()
            return
        self.is_whole = False
        if count:
            entries.finish(count)
            self._sent_entries = self._device_ops.to_device(entries.array, self._sent_entries)
            self.entries_on_device = self._sent_entries
        else:
            assert self._no_entries is not None
            self.entries_on_device = self._no_entries


class Packer:
    """The packed buffers, made once a size."""

    def __init__(self, sections: Callable[[StepSize], Sequence[Section]], device_ops: DeviceOps) -> None:
        self.at = lru_cache(maxsize=256)(lambda size: PackedStep(size, sections(size), device_ops))


def offsets_of(sections: Iterable[Section]) -> list[int]:
    """Where each section begins."""
    offsets, start = [], 0
    for section in sections:
        offsets.append(start)
        start += prod(section.shape)
    return offsets


def unpack(packed: Array, sections: Iterable[Section]) -> dict[str, Array]:
    """Takes the packed buffer apart, on the host or on the device. Traceable, also with symbolic sizes."""
    arrays, start = {}, 0
    for section in sections:
        stop = start + prod(section.shape)
        arrays[section.name] = packed[start:stop].reshape(section.shape)
        start = stop
    return arrays


def pad_into(view: np.ndarray, values: np.ndarray, padding: int) -> None:
    """Writes ``values`` to the front of ``view`` and ``padding`` behind them."""
    view[: len(values)] = values
    view[len(values) :] = padding
