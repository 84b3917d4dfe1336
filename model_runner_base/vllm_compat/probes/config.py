"""Settings that vLLM's releases keep in different places, or do not have.

Platforms read them while vLLM's config package is half loaded, so this file imports nothing of vLLM.
"""

import os
from importlib.resources import files
from typing import Any

HAS_SLOT_PROCESSORS = (files("vllm") / "v1/worker/gpu/sample/logits_processor").is_dir()
"""Whether this vLLM's second model runner has an interface of its own for custom logits processors."""
RAY_CALLS_WORKERS = (files("vllm") / "v1/executor/ray_executor_v2.py").is_file()
"""Whether this vLLM calls Ray's workers like those of its own processes, and not their runners in a graph of Ray's."""


def setting(config: Any, path: str, default: Any = None) -> Any:
    """A setting by its path, such as ``"pass_config.enable_sp"``; the default if this vLLM has no such setting."""
    for name in path.split("."):
        config = getattr(config, name, None)
        if config is None:
            return default
    return config


def uses_second_runner(vllm_config: Any) -> bool:
    """Whether the scheduler takes the worker for vLLM's second model runner, and sends steps as that one reads them."""
    from vllm import envs

    return bool(setting(vllm_config, "use_v2_model_runner", envs.VLLM_USE_V2_MODEL_RUNNER))


def stages_need_second_runner() -> bool:
    """Whether pipeline stages are scheduled asynchronously with the second model runner's steps alone."""
    from vllm.config import VllmConfig

    return hasattr(VllmConfig, "use_v2_model_runner")


def uses_slot_processors(vllm_config: Any) -> bool:
    """Whether custom logits processors have the interface of vLLM's second model runner.

    Releases whose second runner has none take those of the first runner with both.
    """
    return HAS_SLOT_PROCESSORS and uses_second_runner(vllm_config)


def rotary_dims(model_config: Any) -> int:
    """Number of positions that a token is rotated by; as a rule one.

    With M-RoPE it is three, or the number of the model's sections in releases that treat XD-RoPE as M-RoPE. With
    XD-RoPE it is the number of sections.
    """
    if model_config.uses_mrope:
        return setting(model_config, "mrope_num_dims", 3)
    return setting(model_config, "uses_xdrope_dim", 0) or 1


def returns_routed_experts(vllm_config: Any) -> bool:
    """Whether responses must name the experts that each token went to."""
    if hasattr(vllm_config, "aux_output_config"):
        return vllm_config.aux_output_config.enable_return_routed_experts
    model = vllm_config.model_config
    return bool(model and model.enable_return_routed_experts)


def offloads_weights(vllm_config: Any) -> bool:
    """Whether some of the weights must stay on the host."""
    if hasattr(vllm_config, "offload_config"):
        offload = vllm_config.offload_config
        return offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
    return vllm_config.cache_config.cpu_offload_gb > 0


def asks_for_connector(vllm_config: Any) -> bool:
    """Whether a KV connector is asked for, by its own config or by ``kv_offloading_size``."""
    return bool(vllm_config.kv_transfer_config) or vllm_config.cache_config.kv_offloading_size is not None


def calculates_kv_scales(cache_config: Any) -> bool:
    """Whether the scales of an 8-bit KV cache are to be calculated from the first tokens."""
    return bool(setting(cache_config, "calculate_kv_scales", False))


def forgo_kv_scales(cache_config: Any) -> None:
    """Turns off the calculation of scales, which a KV cache in the model's dtype does not need."""
    if hasattr(cache_config, "calculate_kv_scales"):
        cache_config.calculate_kv_scales = False


def asked_block_size(cache_config: Any) -> int | None:
    """Block size that the user gave, or a platform set before; None if there is none. Some releases set a default
    themselves, and note that in a flag."""
    is_asked = getattr(cache_config, "user_specified_block_size", cache_config.block_size is not None)
    return cache_config.block_size if is_asked else None


def set_default_block_size(cache_config: Any, block_size: int) -> None:
    """Sets the block size if the user gave none."""
    if asked_block_size(cache_config) is None:
        cache_config.block_size = block_size


def asked_memory_share(cache_config: Any) -> float | None:
    """``gpu_memory_utilization``, if it is another than vLLM's default; None means that the user set none."""
    share = cache_config.gpu_memory_utilization
    return None if share == type(cache_config).gpu_memory_utilization else share


def preserved_weights(vllm_config: Any) -> list[str]:
    """Patterns of the names of weights that the user wants kept at sleep level 2."""
    return list(setting(vllm_config.model_config, "sleep_preserve_parameter_names", ()))


def device_index(parallel_config: Any, local_rank: int) -> int:
    """Index of a worker's device on its host, where replicas of an engine take devices one after another. In releases
    that give each replica devices of its own it is the local rank."""
    of_replica = getattr(parallel_config, "get_local_gpu_index", None)
    index: int = local_rank if of_replica is None else of_replica(local_rank)
    return index


def num_ray_workers(parallel_config: Any, devices_variable: str) -> int:
    """Number of an engine's Ray workers on this worker's host.

    Releases name the devices of all of them in the config, or in the environment variable of visible devices.
    """
    assigned = setting(parallel_config, "assigned_physical_gpu_ids")
    return len(os.environ[devices_variable].split(",") if assigned is None else assigned)


LOCAL_REPLICAS = "num_local_replicas"
"""Attribute of a ``ParallelConfig`` with the number of replicas on this host. The process of a replica gets a config
that names no others."""


def note_local_replicas(parallel_config: Any) -> None:
    """Notes how many replicas of the engine run on this host, for the processes of the replicas."""
    setattr(parallel_config, LOCAL_REPLICAS, max(num_local_replicas(parallel_config), _asked_replicas(parallel_config)))


def num_local_replicas(parallel_config: Any) -> int:
    """Number of replicas of the engine on this host, as ``note_local_replicas`` has noted it."""
    return int(getattr(parallel_config, LOCAL_REPLICAS, 1))


def _asked_replicas(parallel_config: Any) -> int:
    return parallel_config.data_parallel_size_local if parallel_config.data_parallel_size > 1 else 1


def serve_own_replicas_alone(parallel_config: Any) -> None:
    """Leaves a server with the replicas that it starts itself, where another program balances several servers.

    Replicas of a model without experts share nothing, so servers need not know of each other. vLLM's own way awaits a
    coordinator there, which it starts for models with experts alone.
    """
    is_balanced = parallel_config.data_parallel_external_lb or parallel_config.data_parallel_hybrid_lb
    if parallel_config.is_moe_model or not is_balanced:
        return
    # Hosts of one replica, which both follow from the number of replicas that the server knows of.
    num_hosts, host = parallel_config.nnodes_within_dp, parallel_config.node_rank_within_dp
    parallel_config.data_parallel_size = parallel_config.data_parallel_size_local
    parallel_config.nnodes, parallel_config.node_rank = num_hosts, host
    parallel_config.data_parallel_rank = parallel_config.data_parallel_index = 0
    parallel_config.data_parallel_external_lb = parallel_config.data_parallel_hybrid_lb = False
    if parallel_config.data_parallel_size == 1:
        parallel_config.data_parallel_rank_local = 0  # As in any engine without replicas.
    parallel_config.data_parallel_master_ip = "127.0.0.1"  # The given address may be another host's.
