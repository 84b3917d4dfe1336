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
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.sizes import StepSize

Array = TypeVar("Array", np.ndarray, torch.Tensor)


class Section(NamedTuple):
    """One array in the packed buffer."""

    name: str
    shape: tuple[int, ...]


class Entries:
    """Changes to a packed buffer of ``length`` numbers: each is a place in the buffer and the number to write there.

    ``array`` [2, E] int32 holds up to E of them. Unused entries name the last place of the buffer, which is never read.
    """

    def __init__(self, length: int, capacity: int) -> None:
        self._nowhere = length - 1
        self.array = np.zeros((2, capacity), np.int32)
        self.count = np.zeros(1, np.int64)
        """[1] number of changes, in an array for compiled loops; larger than E if they did not all fit."""
        self.capacity = capacity
        self._num_written = 0
        """Number of entries of the array, from the first on, that may be in use."""
        self.array[0] = self._nowhere

    def clear(self) -> None:
        """Begins a new step."""
        self.count[0] = 0

    def drop(self) -> None:
        """Gives up the changes, which are not sent: any entry of the array may be in use from now on."""
        self._num_written = self.capacity

    def finish(self, count: int) -> None:
        """Marks as unused the entries of an earlier step that follow the first ``count``."""
        if count < self._num_written:
            self.array[0, count : self._num_written] = self._nowhere
        self._num_written = count


class PackedStep:
    """Packed buffer of one size, on the host and on the device."""

    def __init__(self, size: StepSize, sections: Sequence[Section], device_ops: DeviceOps) -> None:
        self.size = size
        self.sections = sections
        self._device_ops = device_ops
        self.buffer = np.zeros(sum(prod(section.shape) for section in sections) + 1, np.int32)
        self.views = unpack(self.buffer, sections)
        """A writable view of each section, with what the last step of this size left there."""
        self.offsets = dict(zip(self.views, offsets_of(sections), strict=True))
        """Index in the buffer at which each section begins."""
        self.entries = Entries(len(self.buffer), capacity=16 + size.num_reqs // 2)
        self._sent: torch.Tensor | None = None
        self._sent_entries: torch.Tensor | None = None
        self._no_entries: torch.Tensor | None = None
        self.on_device: torch.Tensor
        """Buffer on the device; while a step is repeated, as the last run of the graph left it."""
        self.entries_on_device: torch.Tensor
        """[2, E] int32, the changes that the next run of the graph writes to the buffer."""
        self.is_whole = False
        """Whether the last send was of the whole buffer."""

    def send(self) -> None:
        """Sends the whole buffer."""
        if self._no_entries is None:
            self._no_entries = self._device_ops.to_device(self.entries.array)
        self._sent = self.on_device = self._device_ops.to_device(self.buffer, self._sent)
        self.entries_on_device = self._no_entries
        self.is_whole = True
        self.entries.drop()

    def send_entries(self) -> None:
        """Sends the changes; the whole buffer, if there are too many."""
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


class Changes(NamedTuple):
    """Packed buffer of a step, and what changes in it."""

    buffer: np.ndarray
    entries: np.ndarray
    """[2, E] places and numbers (``Entries.array``)."""
    num_changes: np.ndarray
    """[1], as ``Entries.count``."""

    @classmethod
    def of(cls, step: PackedStep) -> "Changes":
        return cls(step.buffer, step.entries.array, step.entries.count)


@compiled
def write_entry(changes: Changes, place: int, value: int) -> None:
    """Writes one number of the packed buffer, and records it as an entry if there is space for one."""
    changes.buffer[place] = value
    count = changes.num_changes[0]
    if count < changes.entries.shape[1]:
        changes.entries[0, count] = place
        changes.entries[1, count] = value
    changes.num_changes[0] += 1


class Packer:
    """Packed buffers, one for each size and place among the steps that are remembered (``step/repeat.py``)."""

    def __init__(self, sections: Callable[[StepSize], Sequence[Section]], device_ops: DeviceOps) -> None:
        self._at = lru_cache(maxsize=256)(lambda size, place: PackedStep(size, sections(size), device_ops))

    def at(self, size: StepSize, place: int = 0) -> PackedStep:
        """Buffer of a size; of steps that repeat in turn each has a place of its own."""
        return self._at(size, place)


def offsets_of(sections: Iterable[Section]) -> list[int]:
    """Index at which each section begins."""
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
    """Writes ``values`` to the front of ``view`` and ``padding`` after them."""
    view[: len(values)] = values
    view[len(values) :] = padding
