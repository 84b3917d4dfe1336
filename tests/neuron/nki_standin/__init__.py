"""A NumPy stand-in for the part of ``nki`` that our kernels use, where Neuron's SDK is not installed.

Every function here is one that NKI 0.7 documents, with its arguments by the same names; what the kernels do not use
is not here. It enforces what is documented of the hardware: partitions, banks and capacity of PSUM and SBUF, tile
sizes of the tensor engine, which engine reaches which memory, access patterns, indices in bounds. Fresh memory is
poison: NaN, or integers that lead out of bounds. It knows nothing of time, engines side by side, or the compiler.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from nki_standin import isa, language, memory

__version__ = "0.7-standin"


def install() -> dict[str, Any]:
    """Modules to put into ``sys.modules``."""
    return {"nki": sys.modules[__name__], "nki.isa": isa, "nki.language": language}


def jit(kernel: Callable) -> Callable:
    raise memory.HardwareError("there is no Neuron device: use nki.simulate")


def simulate(kernel: Callable) -> Callable:
    """Runs the kernel on the host: takes and returns torch tensors."""

    def run(*arguments: Any) -> torch.Tensor:
        memory.start()
        placed = [memory.from_torch(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        result = kernel(*placed)
        if result.storage.buffer != "shared_hbm":
            raise memory.HardwareError("a kernel's output must lie in shared_hbm")
        return memory.to_torch(result)

    return run
