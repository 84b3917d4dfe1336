"""Operations that the step asks of a device, and their defaults for a plain torch device.

The base never calls a vendor's namespace: memory figures, buffers, copies and barriers go through ``DeviceOps``. The
defaults serve any device whose memory is the host's; a subclass overrides what differs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

CONTROL_GROUP_FILES = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    "v2": ("memory.max", "memory.current", ("active_file", "inactive_file")),
}
"""Files of the limit and of the usage, and counts of cached files, for each version of control groups."""


@dataclass(frozen=True)
class MemoryInfo:
    """Device memory in bytes; zeros where the device does not report it."""

    free: int
    total: int


class DeviceOps:
    """Memory, copies and barriers of one device."""

    towers_as_graphs = False
    """Whether image towers that can run as graphs on the device. In these graphs, vLLM's ``MMEncoderAttention`` gets
    the segment of each patch instead of ``cu_seqlens``; patches of one segment see each other."""
    has_float8_caches = False
    """Whether 8-bit KV caches have a dtype of 8-bit floats; else they are bytes, and their contents are viewed as
    floats. A device says so that gathers and scatters 8-bit floats, or that cannot view bytes as floats in a graph."""
    calls_alike = False
    """Whether all calls of the model have the same kinds of arguments, for a compiler that looks at the first call
    only.

    Then no argument is a tensor in one call and missing in another. Addresses and strides of tensors do not change, nor
    does which of them share memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._asleep: dict[str, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]] = {}
        """Storages without memory, by tag: with each its size, and its contents on the host if these are kept."""

    @property
    def eager_device(self) -> torch.device:
        """Device for tensor code that is not part of any graph, which is user-supplied logits processors."""
        return self.device

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(*host_memory())

    def memory_pool(self, tag: str) -> AbstractContextManager:
        """Context in which "weights" or "kv_cache" are allocated, by ``tag``, for a device that frees whole pools in
        ``sleep``."""
        return nullcontext()

    def sleep(self, tag: str, kept: Sequence[torch.Tensor], dropped: Sequence[torch.Tensor]) -> None:
        """Frees the memory of a tag, "weights" or "kv_cache", until ``wake``; ``kept`` and ``dropped`` are its tensors.

        Contents of ``kept`` go to the host, before anything is dropped. If that raises an error, ``wake`` is called,
        and takes back what was freed. Tensors that lie elsewhere than on the device stay as they are.

        The default empties storages of plain torch. Tensors and their views stay the same objects, but addresses
        change. A storage that is shared with NumPy or a file cannot be emptied, and keeps its memory. A device whose
        graphs hold addresses must override both methods, or be no device that sleeps
        (``Platform.is_sleep_mode_available``).
        """
        self.synchronize()
        freed, seen = self._asleep.setdefault(tag, []), set[int]()
        for is_kept, tensors in ((True, kept), (False, dropped)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if not self._is_on_device(tensor) or not storage.nbytes() or storage._cdata in seen:
                    continue
                seen.add(storage._cdata)
                if is_kept and not storage.resizable():
                    continue
                freed.append((storage, storage.nbytes(), _bytes_of(storage).to("cpu", copy=True) if is_kept else None))
                if storage.resizable():
                    storage.resize_(0)

    def wake(self, tag: str) -> None:
        """Takes the memory of a tag back: what was kept has its contents again, what was dropped is zeros."""
        freed = self._asleep.pop(tag, [])
        while freed:
            storage, size, contents = freed.pop()
            if storage.nbytes() != size:
                storage.resize_(size)
            if contents is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(contents)
        self.synchronize()

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def to_device(self, array: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies a host array to the device; the caller may overwrite the array as soon as this returns.

        ``out`` is the tensor that an earlier call returned for an array of this shape. A device that runs its work in
        order writes to it, so that graphs may read fixed addresses; other devices do not touch it.
        """
        if out is None or not out.is_cpu:
            return torch.from_numpy(array.copy()).to(self.device)
        np.copyto(out.numpy(), array)
        return out

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a host tensor, which does not change any more, to the device."""
        return tensor.to(self.device)

    def place(self, module: torch.nn.Module) -> None:
        """Moves a module that was loaded on the host to the device, and puts its weights into the device's layout."""
        module.to(self.device)

    def overwrite(self, tensor: torch.Tensor, contents: torch.Tensor) -> None:
        """Overwrites a tensor that graphs hold with ``contents``, which are on the device and have the same shape."""
        tensor.copy_(contents)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        """Waits for ``tensor`` and returns its contents."""
        return tensor.cpu().numpy()

    def begin_to_host(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """``to_host`` in two halves: starts the copy where the device can, and returns a function to finish it.

        The function waits for this copy alone, and returns the tensor's contents.
        """
        return lambda: self.to_host(tensor)

    def begin_to_host_from_graph(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """``begin_to_host`` of a result of a step's graph, which a later run of the graph may overwrite before the copy
        is finished. A device whose graphs do that copies a clone."""
        return self.begin_to_host(tensor)

    def buffer_address(self, tensor: torch.Tensor) -> int:
        """Address of the tensor's contents, to check that they are written in place."""
        return tensor.data_ptr()

    def mark(self) -> Callable[[], None]:
        """Returns a function that waits for everything launched so far, but for nothing later."""
        return self.synchronize

    def synchronize(self) -> None:
        """Waits for everything that was launched."""


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Free and total bytes of the host's memory that this process may use; ``root`` is where ``proc`` and ``sys`` are
    mounted.

    Docker, Kubernetes, systemd and Slurm limit memory by control groups (cgroups), and end a process that takes more.
    """
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    for folder, version in _control_groups(root):
        limit_file, usage_file, cached = CONTROL_GROUP_FILES[version]
        try:
            limit, usage = int((folder / limit_file).read_text()), int((folder / usage_file).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # No limit ("max"), or no such group in this container.
        if limit < machine.total:
            # A checkpoint that was read stays cached, and counts as usage, until something else needs the memory.
            used = usage - sum(int(counts.get(name, 0)) for name in cached)
            free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def _control_groups(root: Path) -> Iterator[tuple[Path, str]]:
    """Folders, and versions, of the process's control groups for memory: its own, and all that contain it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # No Linux.
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            version = "v2" if number == "0" else "v1"
            mounted = root / "sys/fs/cgroup" / ("" if version == "v2" else "memory")
            own = mounted / path.lstrip("/")
            # A container sees its own group as the mounted one, and perhaps a path of the host's.
            yield from ((folder, version) for folder in (own, *own.parents) if folder.is_relative_to(mounted))
