"""DeviceOps on CUDA: pinned staging, a side stream for what comes back, the driver's memory figures."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps, MemoryInfo

COPIES_IN_FLIGHT = 4
"""Staging buffers for copies to the device: asynchronous scheduling prepares a step while two others are under way."""
SMALLEST_STAGING = 1 << 16
"""Bytes of the smallest staging buffer."""


class CudaDeviceOps(DeviceOps):
    """DeviceOps of a CUDA GPU. A step's copies wait for the device in two cases: in ``to_host``, and in ``to_device``
    while all staging buffers are in use."""

    calls_alike = True  # vLLM's compilation drops Dynamo's guards.

    def __init__(self, device: torch.device, can_sleep: bool = False) -> None:
        """``can_sleep``: weights and KV caches are allocated by vLLM's allocator, which can offload or drop them."""
        super().__init__(device)
        self._can_sleep = can_sleep
        self._contents: dict[str, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        """Tensors of a sleeping pool, by tag, that ``wake`` writes: their contents on the host, or None for zeros."""
        self._staging = cycle([_Staging() for _ in range(COPIES_IN_FLIGHT)])
        self._copy_stream = torch.cuda.Stream(device)

    def memory_info(self) -> MemoryInfo:
        """Memory as the driver counts it, after torch's allocator has handed its unused memory back to the driver."""
        gc.collect()
        torch.cuda.empty_cache()
        return MemoryInfo(*torch.cuda.mem_get_info(self.device))

    def memory_pool(self, tag: str) -> AbstractContextManager:
        if not self._can_sleep:
            return super().memory_pool(tag)
        from vllm.device_allocator.cumem import CuMemAllocator

        return CuMemAllocator.get_instance().use_memory_pool(tag=tag)

    def sleep(self, tag: str, kept: Sequence[torch.Tensor], dropped: Sequence[torch.Tensor]) -> None:
        """Unmaps what was allocated in the pool of a tag; graphs hold addresses, and ``wake`` maps the same ones.

        If nothing is to be dropped, the allocator copies the whole pool to the host.
        """
        copies = [(tensor, tensor.to("cpu", copy=True)) for tensor in kept] if dropped else []
        self._contents[tag] = [*copies, *((tensor, None) for tensor in dropped)]
        self.synchronize()
        _free_pool(tag, is_kept=not dropped)
        gc.collect()
        torch.cuda.empty_cache()

    def wake(self, tag: str) -> None:
        """Maps what ``sleep`` unmapped, which may be a part of the pool if ``sleep`` failed."""
        gc.collect()
        torch.cuda.empty_cache()
        _map_pool(tag)
        for tensor, contents in self._contents.pop(tag, []):
            if contents is None:
                tensor.data.zero_()
            else:
                tensor.data.copy_(contents)
        self.synchronize()

    def peak_memory(self, run: Callable[[], None]) -> int:
        """Bytes of torch's allocator that ``run`` takes at its peak and gives back: what it keeps is not counted."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        self.synchronize()
        gc.collect()
        return torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)

    def to_device(self, array: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies through pinned memory, in the order of the current stream; into ``out`` if given, so that its address
        stays."""
        host = torch.from_numpy(array)
        if out is None:
            out = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        next(self._staging).copy(host, out)
        return out

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        return self.begin_to_host(tensor)()

    def begin_to_host(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """Copies on the side stream, so that a wait for the copy is not a wait for steps that were launched later."""
        host = pinned(tensor.shape, tensor.dtype)
        done = torch.cuda.Event()
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            host.copy_(tensor, non_blocking=True)
            done.record()
        tensor.record_stream(self._copy_stream)

        def wait() -> np.ndarray:
            done.synchronize()
            return host.numpy()

        return wait

    def begin_to_host_from_graph(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        return self.begin_to_host(tensor.clone())

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Page-locked host memory, which the device reads and writes without the host."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _free_pool(tag: str, is_kept: bool) -> None:
    """Unmaps the memory of a pool of vLLM's allocator, which copies it to the host first if it ``is_kept``.

    The allocator's own ``sleep`` frees all pools, and its ``discard``, which some releases have, keeps nothing.
    """
    from vllm.device_allocator import cumem

    runtime: Any = cumem.libcudart
    for address, allocation in cumem.CuMemAllocator.get_instance().pointer_to_data.items():
        each: Any = allocation
        if each.tag != tag or getattr(each, "is_asleep", False):
            continue
        if is_kept:
            size = each.handle[1]
            each.cpu_backup_tensor = pinned((size,), torch.uint8)
            runtime.cudaMemcpy(each.cpu_backup_tensor.data_ptr(), address, size)
        cumem.unmap_and_release(each.handle)
        each.is_asleep = True


def _map_pool(tag: str) -> None:
    """Maps the memory of a pool that ``_free_pool`` unmapped, and copies back what it kept.

    The allocator's own ``wake_up`` maps memory that was never unmapped, too, in releases without ``is_asleep``.
    """
    from vllm.device_allocator import cumem

    runtime: Any = cumem.libcudart
    for address, allocation in cumem.CuMemAllocator.get_instance().pointer_to_data.items():
        each: Any = allocation
        if each.tag != tag or not getattr(each, "is_asleep", False):
            continue
        cumem.create_and_map(each.handle)
        each.is_asleep = False
        if (contents := each.cpu_backup_tensor) is not None:
            runtime.cudaMemcpy(address, contents.data_ptr(), contents.nbytes)
            each.cpu_backup_tensor = None


class _Staging:
    """A pinned buffer that is filled again once its last copy has left it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event()

    def copy(self, host: torch.Tensor, out: torch.Tensor) -> None:
        self._copied.synchronize()  # At once, unless COPIES_IN_FLIGHT others are under way.
        if self._buffer.numel() < host.nbytes:
            size = max(SMALLEST_STAGING, 1 << (host.nbytes - 1).bit_length())
            self._buffer = pinned((size,), torch.uint8)
        staged = self._buffer[: host.nbytes].view(host.dtype).view(host.shape)
        staged.copy_(host)
        out.copy_(staged, non_blocking=True)
        self._copied.record()
