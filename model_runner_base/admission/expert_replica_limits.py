"""Limits of replicas that share the experts of a model (data parallelism)."""

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from model_runner_base.errors import refuse
from model_runner_base.vllm_compat.probes.config import setting

REPLICATED = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures whose tokens were compared over replicas that share experts."""


def check_expert_replicas(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for what replicas that share experts are not served with."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    alone = "use data_parallel_size=1, in several servers if need be"
    refusals = {
        f"{model.architecture} has experts, which replicas share, and that does not run on this device yet: {alone}": (
            not getattr(current_platform, "serves_expert_replicas", False)
        ),
        f"{model.architecture} was not tried with replicas, which share its experts: {alone}, or one of "
        f"{', '.join(REPLICATED)}": model.architecture not in REPLICATED,
        f"all2all_backend={parallel.all2all_backend} is not supported: leave it out, the device's own collectives "
        "bring tokens to experts": parallel.all2all_backend not in ("allgather_reducescatter", "naive"),
        f"{model.quantization} weights were not tried with replicas that share experts: {alone}": model.quantization,
        f"pooling was not tried with replicas that share experts: {alone}": model.runner_type == "pooling",
        "speculative decoding is not supported with replicas that share experts yet: leave out speculative_config": (
            vllm_config.speculative_config
        ),
        "adapters are not supported with replicas that share experts yet: leave out enable_lora": (
            vllm_config.lora_config
        ),
        "replicas that share experts do not sleep yet: leave out enable_sleep_mode": model.enable_sleep_mode,
        "weights of a trainer are not received by replicas that share experts yet: leave out weight_transfer_config": (
            setting(vllm_config, "weight_transfer_config")
        ),
    }
    refuse(refusals)
