"""Settings that vLLM's releases keep in different places, or do not have.

Platforms read them while vLLM's config package is half loaded, so nothing of vLLM is imported here.
"""

from typing import Any


def setting(config: Any, path: str, default: Any = None) -> Any:
    """A setting by its path, such as ``"pass_config.enable_sp"``, or the default where this vLLM has none."""
    for name in path.split("."):
        config = getattr(config, name, None)
        if config is None:
            return default
    return config


def uses_second_runner(vllm_config: Any) -> bool:
    """Whether the scheduler takes the worker for vLLM's second runner, and says what that one wants to hear."""
    from vllm import envs

    return bool(setting(vllm_config, "use_v2_model_runner", envs.VLLM_USE_V2_MODEL_RUNNER))


def rotary_dims(model_config: Any) -> int:
    """How many positions a token is rotated by: one, as a rule; three with M-RoPE, or as many as the model has sections
    where XD-RoPE is taken for it; with XD-RoPE as many as there are sections."""
    if model_config.uses_mrope:
        return setting(model_config, "mrope_num_dims", 3)
    return setting(model_config, "uses_xdrope_dim", 0) or 1


def returns_routed_experts(vllm_config: Any) -> bool:
    """Whether responses are to name the experts that each token went to."""
    if hasattr(vllm_config, "aux_output_config"):
        return vllm_config.aux_output_config.enable_return_routed_experts
    model = vllm_config.model_config
    return bool(model and model.enable_return_routed_experts)


def offloads_weights(vllm_config: Any) -> bool:
    """Whether some of the weights are to stay on the host."""
    if hasattr(vllm_config, "offload_config"):
        offload = vllm_config.offload_config
        return offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
    return vllm_config.cache_config.cpu_offload_gb > 0


def forgo_kv_scales(cache_config: Any) -> None:
    """No layer works out scales of its cache: they are those of fp8 caches, which attention refuses."""
    if hasattr(cache_config, "calculate_kv_scales"):
        cache_config.calculate_kv_scales = False


def set_default_block_size(cache_config: Any, block_size: int) -> None:
    """Where the user gave none, which some releases tell from their own default by a flag."""
    if not getattr(cache_config, "user_specified_block_size", cache_config.block_size is not None):
        cache_config.block_size = block_size
