"""A stand-in for TorchNeuron: registers torch's device ``neuron`` (PrivateUse1), whose tensors the host may not read.

A pytest plugin (``-p private_device``), so that the device is there before anything asks torch or vLLM for one. Its
kernels take half a minute to compile for the first time.
"""

from pathlib import Path

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.cpp_extension import load

from neuron_runner import environment


def nothing(device: object = None) -> None:
    """Stands for what waits or frees: every operator has ended when it returns."""


load("private_device", [str(Path(__file__).with_name("device.cpp"))], is_python_module=False, extra_cflags=["-O1"])
_setup_privateuseone_for_python_backend("neuron")
torch.accelerator.synchronize = nothing
torch.accelerator.empty_host_cache = nothing
environment._driver_shows_device = lambda: True
