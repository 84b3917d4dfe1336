"""Whether the kernels are to be used: Neuron's SDK is installed, new enough, and not switched off."""

import os

from neuron_runner import environment

NKI_VARIABLE = "VLLM_NEURON_NKI"
"""0 runs attention as plain torch, 1 insists on the kernels; by default they run where they can."""
NEEDED = "nki 0.6 or newer (Neuron SDK 2.32), from the index that the AWS Neuron documentation names"


def nki_available() -> bool:
    """Whether a real ``nki`` with compiled loops imports: the public index has a placeholder that raises on import."""
    try:
        import nki
        import nki.isa as nisa
        import nki.language as nl
    except Exception:
        return False
    return hasattr(nki, "jit") and hasattr(nisa, "nc_matmul") and hasattr(nl, "fori_loop")


def require_nki() -> None:
    """Raises RuntimeError, saying what to install, if the kernels cannot be imported."""
    if not nki_available():
        raise RuntimeError(f"paged flash attention needs {NEEDED}; {NKI_VARIABLE}=0 runs attention as plain torch")


def use_nki() -> bool:
    """Whether attention runs through the kernels.

    Raises RuntimeError if VLLM_NEURON_NKI=1 asks for them and they cannot run, ValueError if it is neither 0 nor 1.
    """
    asked = os.environ.get(NKI_VARIABLE)
    if asked not in (None, "0", "1"):
        raise ValueError(f"{NKI_VARIABLE} must be 0 or 1, got {asked!r}")
    if asked == "1":
        require_nki()
        if not environment.neuron_device_visible():
            raise RuntimeError(f"{NKI_VARIABLE}=1, but no Neuron device is visible: leave it out")
        return True
    return asked is None and environment.neuron_device_visible() and nki_available()
