"""DeviceOps over PJRT: Neuron's runtime, or PJRT CPU."""

from collections.abc import Sequence

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from model_runner_base.device_ops import DeviceOps, MemoryInfo
from neuron_runner import weights
from neuron_runner.allocator import give_back_freed_memory
from neuron_runner.executable import UNCOMPILED, zeros


class XlaDeviceOps(DeviceOps):
    """Memory figures come from the runtime's own report, or from the host's where the device is the host."""

    towers_as_graphs = True
    has_float8_caches = True  # torch_xla views bytes as floats on the host, while it traces.

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._freed: dict[str, list[tuple[torch.Tensor, torch.Size, torch.Tensor | None]]] = {}
        """Tensors without contents, by tag: with each its shape, and its contents on the host if these are kept."""

    @property
    def eager_device(self) -> torch.device:
        """The host: outside a graph every new shape would be compiled."""
        return torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        """Bytes as PJRT's allocator reports them; zeros where the runtime reports nothing."""
        if xm.xla_device_hw(self.device) == "CPU":
            give_back_freed_memory()
            return super().memory_info()
        try:
            report = xm.get_memory_info(self.device)
        except RuntimeError as error:
            if "UNIMPLEMENTED" not in str(error):
                raise
            return MemoryInfo(free=0, total=0)
        total = int(report["bytes_limit"])
        return MemoryInfo(free=total - int(report["bytes_used"]), total=total)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().zeros(shape, dtype)
        UNCOMPILED.sync()  # A lazy tensor has no buffer to donate.
        return tensor

    def place(self, module: torch.nn.Module) -> None:
        weights.transpose_linear_weights(module)
        weights.move(module, self.device, self.synchronize)

    def sleep(self, tag: str, kept: Sequence[torch.Tensor], dropped: Sequence[torch.Tensor]) -> None:
        """Gives each tensor empty contents in place of its own: a storage of XLA cannot be emptied. Compiled graphs
        take what the tensors hold when they run, so these must be the same objects."""
        self.synchronize()
        freed = self._freed.setdefault(tag, [])
        for is_kept, tensors in ((True, kept), (False, dropped)):
            for tensor in filter(self._is_on_device, tensors):
                freed.append((tensor, tensor.shape, tensor.cpu() if is_kept else None))
                tensor.data = zeros(torch.Size((0,)), tensor.dtype)
        self.synchronize()
        give_back_freed_memory()

    def wake(self, tag: str) -> None:
        freed = self._freed.pop(tag, [])
        while freed:
            tensor, shape, contents = freed.pop()
            tensor.data = zeros(shape, tensor.dtype) if contents is None else contents.to(self.device)
        self.synchronize()

    def overwrite(self, tensor: torch.Tensor, contents: torch.Tensor) -> None:
        tensor.data = contents  # A copy in place would be a graph; compiled ones read what the tensor holds.

    def buffer_address(self, tensor: torch.Tensor) -> int:
        UNCOMPILED.sync()
        return torch_xla._XLAC._unsafe_buffer_pointer(tensor)

    def synchronize(self) -> None:
        UNCOMPILED.sync()  # What was written in place may still lie on the host.
        xm.wait_device_ops()
