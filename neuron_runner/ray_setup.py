"""What vLLM's Ray executor has to be told, and what it would not do. This module does not import Ray."""

import json
import os

from vllm import envs

from neuron_runner import PLATFORM_VARIABLE
from neuron_runner.environment import NUM_CORES, VISIBLE_CORES

RESOURCE = "neuron_cores"
"""Ray's name for Neuron cores. It counts them where Neuron's tools are; elsewhere it goes by what it is told."""

SET_IN_WORKERS = [f"RAY_EXPERIMENTAL_NOSET_{VISIBLE_CORES}", PLATFORM_VARIABLE]
"""What is 1 in Ray's workers from their start: the cores of a worker are vLLM's to name, and the platform is the
driver's, whatever else their host shows."""

_RESOURCES_OF_A_NEW_CLUSTER = "RAY_OVERRIDE_RESOURCES"
_COPIED = ("NEURON_", "PJRT_", "XLA_", "VLLM_NEURON_", "NPROC")
_OWN = (VISIBLE_CORES, NUM_CORES)
"""A host's, or a worker's."""


def copied_variables() -> list[str]:
    """Names of the driver's environment variables that its workers take over: else they have those of ``ray start``."""
    return [name for name in os.environ if name.startswith(_COPIED) and name not in _OWN]


def check_ray() -> None:
    """Raises ValueError for what would end in an error within Ray, or in waiting for ever."""
    if envs.VLLM_RAY_PER_WORKER_GPUS != 1:
        raise ValueError(
            f"a worker takes one Neuron core, but VLLM_RAY_PER_WORKER_GPUS={envs.VLLM_RAY_PER_WORKER_GPUS:g}: "
            "leave it out"
        )
    cores = os.environ.get(VISIBLE_CORES, "")
    if "-" in cores:
        raise ValueError(f"Ray reads no ranges, but {VISIBLE_CORES}={cores}: name every core, as in 0,1,2,3")


def give_cores(world_size: int) -> None:
    """Where there is no Neuron, a cluster that the engine starts for itself has so many cores for Ray to hand out.

    A cluster that runs already has those that ``ray start --resources`` gave it.
    """
    resources = json.loads(os.environ.get(_RESOURCES_OF_A_NEW_CLUSTER) or "{}")
    resources[RESOURCE] = max(world_size, resources.get(RESOURCE, 0))
    os.environ[_RESOURCES_OF_A_NEW_CLUSTER] = json.dumps(resources)
