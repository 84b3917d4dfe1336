"""What the device's graphs may sort when they draw."""

from model_runner_base.graphs.policy import SortLimits
from neuron_runner import environment
from neuron_runner.config import NeuronConfig, OnDeviceSamplingConfig

MAX_SORT_WIDTH = 16384
"""Neuron's compiler searches longer rows for no more than a few largest numbers."""


def sort_limits(config: NeuronConfig) -> SortLimits:
    """What ``on_device_sampling_config``, or the device, asks of drawing."""
    sampling = config.on_device_sampling_config
    if sampling is None and not environment.neuron_device_visible():
        return SortLimits()
    sampling = sampling or OnDeviceSamplingConfig()
    return SortLimits(sampling.global_topk, MAX_SORT_WIDTH)
