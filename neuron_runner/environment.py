"""What this machine has: torch_xla, Neuron devices, Neuron's own packages."""

import glob
import os
from importlib.metadata import PackageNotFoundError, version

TORCH_XLA_VERSION = "2.9"


class MissingRequirementError(RuntimeError):
    """A package this platform stands on is missing or of another version."""


def neuron_device_visible() -> bool:
    """Whether Neuron's driver shows a device and its runtime package is a real one."""
    return bool(glob.glob("/dev/neuron*")) and neuron_package_is_real()


def neuron_package_is_real() -> bool:
    """The public index holds placeholders of Neuron's packages that raise on import, so only an import tells."""
    try:
        import libneuronxla
    except Exception:
        return False
    return hasattr(libneuronxla, "__version__")


def check_torch_xla() -> None:
    """Raises MissingRequirementError with the command that mends it."""
    command = f"pip install torch_xla=={TORCH_XLA_VERSION}.0"
    try:
        found = version("torch_xla")
    except PackageNotFoundError:
        raise MissingRequirementError(f"torch_xla is not installed: {command}") from None
    if not found.startswith(f"{TORCH_XLA_VERSION}."):
        raise MissingRequirementError(f"torch_xla {found} does not match torch {TORCH_XLA_VERSION}: {command}")
    if glob.glob("/dev/neuron*") and not neuron_package_is_real():
        raise MissingRequirementError(
            "Neuron devices are visible, but the installed Neuron packages are placeholders or missing: install "
            "torch-neuronx from the index that the AWS Neuron documentation names"
        )


ROOT_PORT = 62182
"""Where Neuron's collectives meet on the host of rank 0, unless NEURON_RT_ROOT_COMM_ID says otherwise."""


def share_neuron_cores(rank: int, local_rank: int, world_size: int, root_host: str) -> None:
    """One core a process, and one runtime over all processes; to be called before torch_xla is imported.

    The variables are those that Neuron's own launcher sets (torch_neuronx, PJRT without SPMD). What the user has set
    stands; of several NEURON_RT_VISIBLE_CORES each worker of a host takes its own. Not run on Neuron hardware.
    """
    cores = _visible_cores(os.environ.get("NEURON_RT_VISIBLE_CORES", ""))
    os.environ["NEURON_RT_VISIBLE_CORES"] = str(cores[local_rank] if cores else local_rank)
    os.environ["NEURON_PJRT_PROCESS_INDEX"] = str(rank)
    os.environ["NEURON_PJRT_WORLD_SIZE"] = str(world_size)
    os.environ["NEURON_PJRT_PROCESSES_NUM_DEVICES"] = ",".join(["1"] * world_size)
    os.environ.setdefault("NEURON_RT_ROOT_COMM_ID", f"{root_host}:{ROOT_PORT}")


def _visible_cores(ranges: str) -> list[int]:
    """``"0-2,5"`` as [0, 1, 2, 5]."""
    ends = [part.split("-") for part in ranges.split(",") if part]
    return [core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)]


def share_host_cores(local_world_size: int) -> None:
    """Gives this process its part of the host's threads under XLA:CPU; to be called before that starts.

    XLA's clients read the number from NPROC, which is left as it is if set.
    """
    available = len(os.sched_getaffinity(0))
    os.environ.setdefault("NPROC", str(max(1, available // local_world_size)))
