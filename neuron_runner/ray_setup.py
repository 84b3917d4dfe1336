"""Settings and checks for vLLM's Ray executor. This module does not import Ray."""

import json
import os

from vllm import envs

from neuron_runner import PLATFORM_VARIABLE
from neuron_runner.environment import NUM_CORES, VISIBLE_CORES

RESOURCE = "neuron_cores"
"""Ray's name for Neuron cores. Ray counts them where Neuron's tools are; elsewhere it takes the number it is given."""

SET_IN_WORKERS = [f"RAY_EXPERIMENTAL_NOSET_{VISIBLE_CORES}", PLATFORM_VARIABLE]
"""Variables that are 1 in Ray's workers from their start. vLLM, not Ray, names the cores of a worker; and a worker's
platform is the driver's, whatever devices its host has."""

_RESOURCES_OF_A_NEW_CLUSTER = "RAY_OVERRIDE_RESOURCES"
_COPIED = ("NEURON_", "PJRT_", "XLA_", "VLLM_NEURON_", "NPROC")
_OWN = (VISIBLE_CORES, NUM_CORES)
"""Variables that belong to one host or one worker, so they are not copied."""


def copied_variables() -> list[str]:
    """Names of the driver's environment variables that its workers take over, in place of those of ``ray start``."""
    return [name for name in os.environ if name.startswith(_COPIED) and name not in _OWN]


def check_ray() -> None:
    """Raises ValueError for settings with which Ray would raise an error of its own or wait for ever."""
    if envs.VLLM_RAY_PER_WORKER_GPUS != 1:
        raise ValueError(
            f"a worker takes one Neuron core, but VLLM_RAY_PER_WORKER_GPUS={envs.VLLM_RAY_PER_WORKER_GPUS:g}: "
            "leave it out"
        )
    cores = os.environ.get(VISIBLE_CORES, "")
    if "-" in cores:
        raise ValueError(f"Ray reads no ranges, but {VISIBLE_CORES}={cores}: name every core, as in 0,1,2,3")


def give_cores(world_size: int) -> None:
    """Sets the number of cores, at least ``world_size``, of a cluster that the engine starts on a host without Neuron.

    A cluster that runs already has those that ``ray start --resources`` gave it.
    """
    resources = json.loads(os.environ.get(_RESOURCES_OF_A_NEW_CLUSTER) or "{}")
    resources[RESOURCE] = max(world_size, resources.get(RESOURCE, 0))
    os.environ[_RESOURCES_OF_A_NEW_CLUSTER] = json.dumps(resources)
