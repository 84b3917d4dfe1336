"""What the step asks of a device, and how a plain torch device answers.

The base never calls a vendor's namespace: memory figures, buffers, copies and barriers go through ``DeviceOps``. The
class as it stands serves any device whose memory is the host's; a subclass overrides what differs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import psutil
import torch


@dataclass(frozen=True)
class MemoryInfo:
    """Device memory in bytes; zeros where the device does not report it."""

    free: int
    total: int


class DeviceOps:
    """Memory, copies and barriers of one device."""

    towers_as_graphs = False
    """Whether image towers run as graphs on the device, those that can. vLLM's ``MMEncoderAttention`` is given the
    segment of each patch there in place of ``cu_seqlens``: patches of one segment see each other.
    """
    calls_alike = False
    """Whether all calls of the model have the same kinds of arguments, for a compiler that looks at the first alone.

    None is a tensor in one call and missing in another, and where a tensor lies, how far its rows are apart, and which
    share memory does not change.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def eager_device(self) -> torch.device:
        """Where tensor code that is not part of any graph runs: user-supplied logits processors."""
        return self.device

    def memory_info(self) -> MemoryInfo:
        memory = psutil.virtual_memory()
        return MemoryInfo(free=memory.available, total=memory.total)

    def memory_pool(self, tag: str) -> AbstractContextManager:
        """Where "weights" and "kv_cache" are allocated, each within its own: a device that sleeps sets them aside."""
        return nullcontext()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def to_device(self, array: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies a host array to the device; the caller may overwrite the array as soon as this returns.

        ``out`` is what an earlier call returned for an array of this shape: a device that runs what it is given in
        order writes there, and its graphs may read fixed addresses; another leaves it alone.
        """
        if out is None or not out.is_cpu:
            return torch.from_numpy(array.copy()).to(self.device)
        np.copyto(out.numpy(), array)
        return out

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a host tensor to the device; nobody changes it any more."""
        return tensor.to(self.device)

    def place(self, module: torch.nn.Module) -> None:
        """Moves a module that was loaded on the host, and lays out its weights as the device wants them."""
        module.to(self.device)

    def overwrite(self, tensor: torch.Tensor, contents: torch.Tensor) -> None:
        """Puts ``contents``, which lie on the device, in place of a tensor's that graphs hold; both of one shape."""
        tensor.copy_(contents)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        """Waits for ``tensor`` and returns its contents."""
        return tensor.cpu().numpy()

    def begin_to_host(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """``to_host`` in two halves: starts the copy where the device can, and returns what waits for it alone."""
        return lambda: self.to_host(tensor)

    def buffer_address(self, tensor: torch.Tensor) -> int:
        """Where the tensor's contents lie, to show that they are written in place."""
        return tensor.data_ptr()

    def mark(self) -> Callable[[], None]:
        """What waits for all that was launched so far, and for nothing later."""
        return self.synchronize

    def synchronize(self) -> None:
        """Waits for everything that was launched."""
