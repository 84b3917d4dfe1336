"""Attention kernels in NKI, the Neuron Kernel Interface. Not run on Neuron hardware. See docs/nki.md.

Only ``dialect.py`` and ``kernel.py`` import ``nki``; everything else is importable without the SDK.
"""

from neuron_runner.nki.availability import nki_available, use_nki

__all__ = ["nki_available", "use_nki"]
