"""Limits of what the device's graphs sort when they draw tokens."""

from model_runner_base.step.graph_policy import SortLimits
from neuron_runner import environment
from neuron_runner.config import NeuronConfig, OnDeviceSamplingConfig

MAX_SORT_WIDTH = 16384
"""The longest row that is searched at once: in longer ones Neuron's compiler finds only a few largest numbers."""


def sort_limits(config: NeuronConfig) -> SortLimits:
    """The limits that ``on_device_sampling_config`` sets, or else the device; none on PJRT CPU by default."""
    sampling = config.on_device_sampling_config
    if sampling is None and not environment.neuron_device_visible():
        return SortLimits()
    sampling = sampling or OnDeviceSamplingConfig()
    return SortLimits(sampling.global_topk, MAX_SORT_WIDTH)
