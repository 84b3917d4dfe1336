"""Measurement of device memory, for any device."""

import gc
from types import TracebackType

from model_runner_base.device_ops import DeviceOps


class DeviceMemoryProfiler:
    """Measures the bytes of device memory that are still in use after a block of code.

    >>> with DeviceMemoryProfiler(device_ops) as profiler:
    ...     model = load()
    >>> profiler.consumed_memory
    """

    def __init__(self, device_ops: DeviceOps) -> None:
        self.device_ops = device_ops
        self.initial_memory = 0
        self.consumed_memory = 0

    def current_memory_usage(self) -> int:
        info = self.device_ops.memory_info()
        return info.total - info.free

    def __enter__(self) -> "DeviceMemoryProfiler":
        gc.collect()
        self.device_ops.synchronize()
        self.initial_memory = self.current_memory_usage()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gc.collect()
        self.device_ops.synchronize()
        # Of host memory, other processes may have freed more.
        self.consumed_memory = max(0, self.current_memory_usage() - self.initial_memory)
