"""Memory of the device: how much there is, and what is taken of it."""

import weakref

import torch

from model_runner_base import DeviceOps, MemoryInfo, StepLimits

TOTAL = 2 << 30


class AcmeDeviceOps(DeviceOps):
    taken = 0

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=TOTAL - AcmeDeviceOps.taken, total=TOTAL)  # your driver's figures

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return counted(super().zeros(shape, dtype))

    def place(self, module: torch.nn.Module) -> None:
        super().place(module)
        for weight in (*module.parameters(), *module.buffers()):
            counted(weight)


def counted(tensor: torch.Tensor) -> torch.Tensor:
    """Counts a tensor's bytes as taken until they are freed."""
    storage = tensor.untyped_storage()
    AcmeDeviceOps.taken += storage.nbytes()
    weakref.finalize(storage, free, storage.nbytes())
    return tensor


def free(num_bytes: int) -> None:
    AcmeDeviceOps.taken -= num_bytes


def workspace(limits: StepLimits, num_heads: int, head_size: int) -> int:
    """Bytes that the attention kernel needs for one tile: keys and values, each twice, and three arrays of scores."""
    return 4 * limits.max_model_len * num_heads * (4 * head_size + 3 * limits.chunk.query)
