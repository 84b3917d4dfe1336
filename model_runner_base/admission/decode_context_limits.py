"""Limits of ranks that keep a part of each request's positions (decode context parallelism, DCP)."""

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.platforms import current_platform

from model_runner_base.errors import refuse
from model_runner_base.vllm_compat.probes.config import asks_for_connector, setting
from model_runner_base.vllm_compat.probes.models import has_unequal_heads
from model_runner_base.vllm_compat.types.recurrent import has_states


def check_decode_context(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for what ranks with a part of each request are not served with."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    refusals = {
        "decode context parallelism does not run on this device yet: use decode_context_parallel_size=1": (
            not getattr(current_platform, "serves_decode_context", False)
        ),
        "pipeline stages are not supported with decode context parallelism yet: use pipeline_parallel_size=1 or "
        "decode_context_parallel_size=1": parallel.pipeline_parallel_size > 1,
        "replicas are not supported with decode context parallelism yet: use data_parallel_size=1 or "
        "decode_context_parallel_size=1": parallel.data_parallel_size > 1,
        "speculative decoding is not supported with decode context parallelism yet: leave out speculative_config": (
            vllm_config.speculative_config
        ),
        "adapters are not supported with decode context parallelism yet: leave out enable_lora": (
            vllm_config.lora_config
        ),
        "KV connectors are not supported with decode context parallelism yet: leave out kv_transfer_config and "
        "kv_offloading_size": asks_for_connector(vllm_config),
        f"dcp_comm_backend={setting(parallel, 'dcp_comm_backend')} is not supported: leave it out": (
            setting(parallel, "dcp_comm_backend", "ag_rs") != "ag_rs"
        ),
        "queries are not replicated over ranks yet: leave out dcp_q_replicate": (
            setting(parallel, "dcp_q_replicate", False)
        ),
        "recurrent layers are not cut over positions yet: use decode_context_parallel_size=1": has_states(vllm_config),
    }
    refuse(refusals)
    if model is not None:
        _check_model(model, parallel.tensor_parallel_size, parallel.decode_context_parallel_size)


def check_copies(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for a loaded model with a layer whose KV heads are not alike in a group.

    The config has one number of KV heads, and a layer may have another one. Then the ranks of a group would keep parts
    of different heads.
    """
    size = vllm_config.parallel_config.decode_context_parallel_size
    layers = [layer for layer in model.modules() if isinstance(layer, QKVParallelLinear)] if size > 1 else []
    copies = {layer.num_kv_head_replicas for layer in layers}
    refuse(
        {
            f"KV heads of some layers are on {min(copies, default=size)} ranks, which are no groups of {size}: use "
            "decode_context_parallel_size=1": any(number % size for number in copies)
        }
    )


def _check_model(model: ModelConfig, num_ranks: int, size: int) -> None:
    """Refuses models whose layers keep or see other keys than those of a whole context."""
    config = model.hf_text_config
    copies = num_ranks // model.get_total_num_kv_heads()
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    refusals = {
        "latent attention (MLA) is not cut over positions yet: use decode_context_parallel_size=1": model.use_mla,
        "keys and values of unequal heads are not cut over positions yet: use decode_context_parallel_size=1": (
            has_unequal_heads(model.architecture, config)
        ),
        "layers with a window, or with attention in chunks, are not cut over positions yet: use "
        "decode_context_parallel_size=1": window,
        "pooling models are not supported with decode context parallelism yet: use decode_context_parallel_size=1": (
            model.runner_type == "pooling"
        ),
        "images and other items are not supported with decode context parallelism yet: use "
        "decode_context_parallel_size=1": model.is_multimodal_model,
        "encoder-decoder models are not supported with decode context parallelism yet: use "
        "decode_context_parallel_size=1": model.is_encoder_decoder,
        f"a KV head is on {copies} ranks, which are no groups of {size}: use a decode_context_parallel_size that "
        f"divides {copies}": copies % size,
    }
    refuse(refusals)
