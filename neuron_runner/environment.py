"""What this machine has: torch_xla, Neuron devices, Neuron's own packages."""

import glob
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
