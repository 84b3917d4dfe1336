"""Facts about this machine: torch_xla, Neuron devices, the cores that this process may use, Neuron's own packages."""

import glob
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from urllib.parse import urlsplit

import torch

TORCH_XLA_VERSION = "2.9"
INSTALL = f"pip install torch_xla=={TORCH_XLA_VERSION}.0"
VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
NUM_CORES = "NEURON_RT_NUM_CORES"
ROOT_PORT = 62182
"""Port on the host of rank 0 at which Neuron's collectives meet, unless NEURON_RT_ROOT_COMM_ID says otherwise."""


class MissingRequirementError(RuntimeError):
    """A package or device that this platform needs is missing, or of another version."""


def neuron_device_visible() -> bool:
    """Whether steps run on Neuron: a device is present, and either torch or torch_xla can use it.

    torch can if TorchNeuron has registered its device; torch_xla can if its runtime package for Neuron is a real one.
    """
    return neuron_device_present() and (torch_device_type() == "neuron" or neuron_package_is_real())


def neuron_device_present() -> bool:
    """Whether Neuron's driver shows a device, and ``PJRT_DEVICE``, which torch_xla goes by, names no other."""
    return _neuron_wanted() and _driver_shows_device()


def has_torch_xla() -> bool:
    return find_spec("torch_xla") is not None


def torch_device_type() -> str:
    """Type of the device of steps without torch_xla: ``neuron`` if TorchNeuron has registered it, else ``cpu``."""
    accelerator = torch.accelerator.current_accelerator()
    return "neuron" if accelerator is not None and accelerator.type == "neuron" else "cpu"


def torch_device() -> torch.device:
    """The device of steps without torch_xla: torch's own device of Neuron, or the host. Not run on Neuron hardware.

    Raises MissingRequirementError if Neuron devices are visible and torch has none.
    """
    if not neuron_device_present():
        return torch.device("cpu")
    if torch_device_type() != "neuron":
        raise MissingRequirementError(
            "Neuron devices are visible, but torch has no device of theirs: install TorchNeuron's torch-neuronx from "
            "the index that the AWS Neuron documentation names, or set PJRT_DEVICE=CPU"
        )
    return torch.device("neuron")


def _neuron_wanted() -> bool:
    return os.environ.get("PJRT_DEVICE", "NEURON") == "NEURON"


def _driver_shows_device() -> bool:
    return bool(glob.glob("/dev/neuron*"))


def neuron_package_is_real() -> bool:
    """Whether ``libneuronxla`` is Neuron's own. The public index has placeholders that raise on import: it is tried."""
    try:
        import libneuronxla
    except Exception:
        return False
    return hasattr(libneuronxla, "__version__")


def check_torch_xla() -> None:
    """Raises MissingRequirementError if torch_xla, or what it needs of Neuron, is missing or wrong; says what to do."""
    try:
        found = version("torch_xla")
    except PackageNotFoundError:
        raise MissingRequirementError(f"torch_xla is not installed: {INSTALL}") from None
    if not found.startswith(f"{TORCH_XLA_VERSION}."):
        raise MissingRequirementError(f"torch_xla {found} does not match torch {TORCH_XLA_VERSION}: {INSTALL}")
    if os.environ.get("PJRT_DEVICE") == "NEURON" and not _driver_shows_device():
        raise MissingRequirementError(
            "PJRT_DEVICE=NEURON, but the Neuron driver shows no device (/dev/neuron*): install the driver, or set "
            "PJRT_DEVICE=CPU"
        )
    if neuron_device_present() and not neuron_package_is_real():
        raise MissingRequirementError(
            "Neuron devices are visible, but the installed Neuron packages are placeholders or missing: install "
            "torch-neuronx from the index that the AWS Neuron documentation names, or set PJRT_DEVICE=CPU"
        )


def xla_is_running() -> bool:
    """Whether this process has XLA's devices open: then it has threads that a process forked from it would wait for."""
    extension = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    return extension is not None and extension._xla_runtime_is_initialized()


def check_device(hardware: str) -> None:
    """Raises MissingRequirementError if torch_xla's device (``xm.xla_device_hw``) is not what the engine was set up
    for."""
    if neuron_device_visible() and hardware != "NEURON":
        raise MissingRequirementError(
            f"Neuron devices are visible, but torch_xla runs on {hardware}: check that torch-neuronx and torch_xla "
            f"{TORCH_XLA_VERSION} belong together, or set PJRT_DEVICE=CPU"
        )


def check_cores(num_workers: int) -> None:
    """Raises ValueError if the Neuron runtime was given fewer cores than this host's workers, which take one each."""
    if os.environ.get(VISIBLE_CORES):
        named = _visible_cores(os.environ[VISIBLE_CORES])
        variable, cores = VISIBLE_CORES, None if named is None else len(named)
    elif os.environ.get(NUM_CORES):
        variable, cores = NUM_CORES, _whole_number(os.environ[NUM_CORES])
    else:
        return
    if cores is None:
        form = 'core numbers and ranges such as "0-3,6"' if variable == VISIBLE_CORES else "a whole number"
        raise ValueError(f"{variable} must be {form}, got {os.environ[variable]!r}")
    if cores < num_workers:
        raise ValueError(
            f"{num_workers} workers take a Neuron core each, but {variable}={os.environ[variable]} gives {cores}: give "
            "more cores, or lower tensor_parallel_size"
        )


def _whole_number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _visible_cores(text: str) -> list[int] | None:
    """``"0-2,5"`` as [0, 1, 2, 5]; None if it cannot be read so."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            return None
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(cores)


def host_of(init_method: str) -> str:
    """The host of rank 0, where torch.distributed's init method has the ranks meet."""
    address = urlsplit(init_method).netloc
    return address.rpartition(":")[0] if address else os.environ["MASTER_ADDR"]  # The latter for env://.


def share_neuron_cores(rank: int, local_rank: int, world_size: int, root_host: str) -> None:
    """Gives this process one core, and all processes one runtime; to be called before torch_xla is imported.

    The variables are those that Neuron's own launcher sets (torch_neuronx, PJRT without SPMD). If the user's
    NEURON_RT_VISIBLE_CORES names cores, each worker of a host takes one of them. NEURON_RT_ROOT_COMM_ID is kept if it
    is set; the others are overwritten. Not run on Neuron hardware.
    """
    cores = _visible_cores(os.environ.get(VISIBLE_CORES, ""))
    os.environ[VISIBLE_CORES] = str(cores[local_rank] if cores else local_rank)
    os.environ["NEURON_PJRT_PROCESS_INDEX"] = str(rank)
    os.environ["NEURON_PJRT_WORLD_SIZE"] = str(world_size)
    os.environ["NEURON_PJRT_PROCESSES_NUM_DEVICES"] = ",".join(["1"] * world_size)
    os.environ.setdefault("NEURON_RT_ROOT_COMM_ID", f"{root_host}:{ROOT_PORT}")


def share_host_cores(num_local_workers: int) -> None:
    """Gives this process its share of the host's threads under XLA:CPU; to be called before XLA:CPU starts.

    XLA's clients read the number from NPROC, which is left as it is if set.
    """
    available = len(os.sched_getaffinity(0))
    os.environ.setdefault("NPROC", str(max(1, available // num_local_workers)))
