"""Copies between the host and a device that works late."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.device_allocator import cumem

import gpu_runner.cuda_graphs
import gpu_runner.device_ops
import gpu_runner.model_runner
from gpu_runner.device_ops import COPIES_IN_FLIGHT, CudaDeviceOps


def test_results_are_copied_once_they_are_there_and_kept_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are copied on the side stream, after what was launched; torch's allocator is told of it."""
    done: list[str] = []

    class Side:
        def wait_stream(self, other: str) -> None:
            done.append(f"wait for {other}")

    class Event:
        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait for the event")

    @contextmanager
    def on(stream: Side) -> Iterator[None]:
        done.append("on the side stream")
        yield
        done.append("back")

    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Side())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the main stream")
    monkeypatch.setattr(gpu_runner.device_ops, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **kwargs: done.append("copy") or copy(*args, **kwargs))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: done.append("kept for the side stream"))
    wait = CudaDeviceOps(torch.device("cpu")).begin_to_host(torch.arange(3))
    expected = ["wait for the main stream", "on the side stream", "copy", "record", "back", "kept for the side stream"]
    assert done == expected
    assert wait().tolist() == [0, 1, 2] and done[len(expected) :] == ["wait for the event"]


class LateDevice:
    """Device that runs what is launched, in order, only when it is waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.queue))):
            self.queue.pop(0)()

    def event(self) -> Any:
        position: list[int] = []
        launched = self

        class Event:
            def record(self) -> None:
                done = position.clear
                position[:] = [1]
                launched.queue.append(done)

            def synchronize(self) -> None:
                while position:
                    launched.run(1)

        return Event()


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 4)), min_size=1, max_size=4 * COPIES_IN_FLIGHT)
)
def test_a_host_array_may_change_as_soon_as_its_copy_was_launched(steps: list[tuple[int, bool, int]]) -> None:
    """Steps give the array's length, whether it goes where the last of that length went, and how much the device
    runs."""
    device = LateDevice()
    copy = torch.Tensor.copy_

    def late(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(self, source)
        device.queue.append(lambda: copy(self, source))
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(torch.cuda, "Event", device.event)
        patch.setattr(gpu_runner.device_ops, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
        patch.setattr(torch.Tensor, "copy_", late)
        ops = CudaDeviceOps(torch.device("cpu"))
        arrays: dict[int, np.ndarray] = {}
        sent: list[tuple[torch.Tensor, list[int]]] = []
        last: dict[int, torch.Tensor] = {}
        for number, (length, stays, runs) in enumerate(steps):
            array = arrays.setdefault(length, np.zeros(length, np.int32))
            array[:] = number
            out = last.get(length) if stays else None
            last[length] = ops.to_device(array, out)
            assert out is None or last[length] is out
            sent = [(tensor, values) for tensor, values in sent if tensor is not last[length]]
            sent.append((last[length], array.tolist()))
            array[:] = -1
            device.run(runs)
        device.run(len(device.queue))
    for tensor, values in sent:
        assert tensor.tolist() == values


class Pools:
    """Stand-in for vLLM's allocator, whose addresses are those of tensors; memory that is unmapped is spoiled.

    Its entries have no ``is_asleep``, as in vLLM 0.16. Memory is mapped, or unmapped, once, as the driver wants it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pointer_to_data: dict[int, Any] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._mapped: set[int] = set()
        monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: self)
        monkeypatch.setattr(cumem, "create_and_map", self._map)
        monkeypatch.setattr(cumem, "unmap_and_release", self._unmap)
        monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=ctypes.memmove))
        monkeypatch.setattr(gpu_runner.device_ops, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: None)

    def add(self, tag: str, numbers: int) -> torch.Tensor:
        tensor = torch.arange(1.0, numbers + 1)
        address = tensor.data_ptr()
        self._tensors[address] = tensor
        self._mapped.add(address)
        self.pointer_to_data[address] = SimpleNamespace(
            tag=tag, handle=(0, tensor.nbytes, address, 0), cpu_backup_tensor=None
        )
        return tensor

    def _map(self, handle: tuple[int, ...]) -> None:
        assert handle[2] not in self._mapped
        self._mapped.add(handle[2])

    def _unmap(self, handle: tuple[int, ...]) -> None:
        self._mapped.remove(handle[2])
        self._tensors[handle[2]].fill_(7)


@pytest.mark.parametrize("level", [1, 2])
def test_pools_sleep_by_tag(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is kept is copied as a whole, with what is no weight; of one that is dropped, the kept tensors."""
    pools = Pools(monkeypatch)
    weight, buffer, unknown = (pools.add("weights", 4) for _ in range(3))
    cache = pools.add("kv_cache", 4)
    ops = CudaDeviceOps(torch.device("cpu"), can_sleep=True)
    for _ in range(2):
        for each in (weight, buffer, unknown, cache):
            each.copy_(torch.arange(1.0, 5.0))
        ops.sleep("weights", [weight, buffer] if level == 1 else [buffer], [] if level == 1 else [weight])
        assert [each.tolist() for each in (weight, buffer, unknown)] == [[7.0] * 4] * 3
        assert cache.tolist() == [1, 2, 3, 4]
        ops.sleep("kv_cache", [], [cache])
        assert cache.tolist() == [7] * 4
        ops.wake("kv_cache")
        assert cache.tolist() == [0] * 4 and weight.tolist() == [7] * 4
        ops.wake("weights")
        assert buffer.tolist() == [1, 2, 3, 4]
        assert [weight.tolist(), unknown.tolist()] == ([[1, 2, 3, 4]] * 2 if level == 1 else [[0] * 4, [7] * 4])


def test_a_pool_that_sleeps_in_part_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory may end before the whole pool is copied."""
    pools = Pools(monkeypatch)
    first, second = pools.add("weights", 4), pools.add("weights", 8)
    ops = CudaDeviceOps(torch.device("cpu"), can_sleep=True)

    def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if shape[0] == second.nbytes:
            raise MemoryError
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(gpu_runner.device_ops, "pinned", pinned)
    with pytest.raises(MemoryError):
        ops.sleep("weights", [first, second], [])
    assert first.tolist() == [7] * 4
    ops.wake("weights")
    assert first.tolist() == [1, 2, 3, 4] and second.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
