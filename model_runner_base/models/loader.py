"""Loading of a checkpoint by vLLM's own loaders; an error names the first misfit."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, update_config
from vllm.model_executor.layers import rotary_embedding

from model_runner_base.admission.config_fields import describe_lack
from model_runner_base.admission.hybrid_config import check_kernels
from model_runner_base.errors import CheckpointError as CheckpointError
from model_runner_base.errors import UnsupportedConfigError, first_line
from model_runner_base.models.draft_loading import load_draft
from model_runner_base.models.layers.block_sparse import use_plain_block_sparse
from model_runner_base.models.layers.cache_scales import CacheScales, has_small_cache
from model_runner_base.models.layers.compressed_attention import use_plain_compressed
from model_runner_base.models.layers.fused_moe import use_plain_experts
from model_runner_base.models.layers.indexer import use_plain_indexers
from model_runner_base.models.layers.latent_attention import use_plain_latents
from model_runner_base.models.layers.replaced_experts import check_activation, follow_activation
from model_runner_base.models.misfits import misfit_of_config
from model_runner_base.models.patches.checkpoints import load_dbrx, load_olmo_hybrid, load_router_biases
from model_runner_base.models.patches.experts import adapt_experts, allow_experts_without_gate
from model_runner_base.models.patches.layers import (
    correct_modernbert,
    correct_windows,
    use_models_dtype,
    use_plain_kimi_linear,
    use_plain_unequal_heads,
)
from model_runner_base.models.recurrent.layers import use_plain_recurrences
from model_runner_base.models.weight_stream import get_model, keep_all
from model_runner_base.vllm_compat.patches.whole_tokens import keep_tokens_whole
from model_runner_base.vllm_compat.patches.without_indexer import hides_keys, num_indexed_keys
from model_runner_base.vllm_compat.probes.experts import wrong_in_float16
from model_runner_base.vllm_compat.probes.models import is_deepseek_v4, is_minimax_m3
from model_runner_base.vllm_compat.types.deepseek_v4 import plain_deepseek_v4
from model_runner_base.vllm_compat.types.recurrent import has_states

EXPLAINED = (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of a model's class that a config or a checkpoint may be at fault for."""


def load_checkpoint(vllm_config: VllmConfig, use_plain_layers: bool = True) -> nn.Module:
    """Returns the model with its weights, on the device of ``load_config``; raises CheckpointError for the first
    misfit.

    ``use_plain_layers`` puts the base's plain torch in place of layers whose kernels vLLM has for some devices only.
    """
    if has_states(vllm_config) and not use_plain_layers:
        check_kernels(vllm_config)
    if is_deepseek_v4(vllm_config.model_config.architecture) and not use_plain_layers:
        raise UnsupportedConfigError(
            "DeepSeek V4 runs in plain torch, which this device does not use: use another model"
        )
    if vllm_config.model_config.use_mla and not use_plain_layers:
        if num_indexed_keys(vllm_config.model_config) is not None:
            raise UnsupportedConfigError(
                "models with an indexer (DSA) run in plain torch, which this device does not use: use another model"
            )
        raise UnsupportedConfigError(
            "latent attention (MLA) runs in plain torch, which this device does not use: set VLLM_MLA_DISABLE=1, with "
            "which keys and values are kept"
        )
    if is_minimax_m3(vllm_config.model_config.architecture) and not use_plain_layers:
        raise UnsupportedConfigError(
            "MiniMax M3 runs in plain torch, which this device does not use: use another model"
        )
    if vllm_config.parallel_config.data_parallel_size > 1 and not use_plain_layers:
        raise UnsupportedConfigError(
            "replicas share experts that run in plain torch, which this device does not use: use data_parallel_size=1, "
            "in several servers if need be"
        )
    # vLLM shares rotary embeddings of equal settings, and some models change theirs; the next model must not find
    # these.
    rotary_embedding._ROPE_DICT.clear()
    is_draft = False
    # vLLM's own kernels read the scales that vLLM loads.
    scales = CacheScales() if use_plain_layers and has_small_cache(vllm_config) else None
    load_dbrx(vllm_config)
    load_router_biases()
    adapt_experts(_models_of(vllm_config), follow_activation if use_plain_layers else check_activation)
    use_models_dtype(vllm_config)
    if use_plain_layers:
        keep_tokens_whole()
        allow_experts_without_gate()
        load_olmo_hybrid(vllm_config)
        use_plain_kimi_linear(vllm_config)
        use_plain_unequal_heads(vllm_config.model_config)
    try:
        made_plain = plain_deepseek_v4(vllm_config) if use_plain_layers else nullcontext()
        with scales.places if scales else nullcontext(), made_plain:
            model = get_model(vllm_config, filtered=scales.take if scales else keep_all)
        is_draft = True
        load_draft(vllm_config, model)
        is_draft = False
        assert isinstance(vllm_config.model_config.dtype, torch.dtype)
        if vllm_config.model_config.dtype == torch.float16 and (layer := wrong_in_float16(model)):
            raise UnsupportedConfigError(
                f"{layer}: vLLM adds shared experts with a wrong weight in float16: set dtype to bfloat16 or float32"
            )
        correct_modernbert(model, vllm_config.model_config.dtype)
        correct_windows(model)
        if use_plain_layers:
            use_plain_experts(model)
            use_plain_recurrences(model)
            use_plain_latents(model)
            use_plain_block_sparse(model, vllm_config)
            use_plain_compressed(model, vllm_config)
            # A draft has an indexer of its own, and may never keep vLLM's.
            if any(map(hides_keys, _models_of(vllm_config))):
                use_plain_indexers(model)
        if scales:
            scales.apply(model)
        return model
    except (NotImplementedError, UnsupportedConfigError, torch.OutOfMemoryError):
        raise  # A layer or the platform lacks something, or memory is full: no fault of the checkpoint.
    except Exception as error:
        model_config, speculation = vllm_config.model_config, vllm_config.speculative_config
        message = f"cannot load checkpoint {model_config.model}"
        if is_draft and speculation is not None:
            model_config, message = speculation.draft_model_config, f"cannot load draft {speculation.model}"
        reason = first_line(error)
        may_be_of_config = isinstance(error, EXPLAINED) and not isinstance(error, CheckpointError)
        if may_be_of_config and (lack := describe_lack(model_config, error)):
            reason = lack if isinstance(error, AttributeError) else f"{reason}; {lack}"
            raise CheckpointError(f"{message}: {reason}") from error
        if isinstance(error, AttributeError | TypeError) or not isinstance(error, EXPLAINED):
            raise  # A fault of the code.
        if not is_draft and (misfit := misfit_of_config(model_config)) and misfit not in reason:
            reason += (
                f"; compared with transformers' model, {misfit}: save the checkpoint again, or correct config.json"
            )
        raise CheckpointError(f"{message}: {reason}") from error


def _models_of(vllm_config: VllmConfig) -> list[ModelConfig]:
    """Configs of the model, and of its draft model if there is one."""
    speculation = vllm_config.speculative_config
    draft = None if speculation is None else speculation.draft_model_config
    return [vllm_config.model_config, *([] if draft is None else [draft])]


def change_config(vllm_config: VllmConfig, overrides: dict[str, dict[str, Any]]) -> None:
    """Changes fields of ``load_config``; raises ValueError for another config, and then changes nothing."""
    if others := overrides.keys() - {"load_config"}:
        raise ValueError(
            f"{', '.join(sorted(others))} cannot be changed while the engine runs, only load_config: to read another "
            "checkpoint, call reload_weights(weights_path=...)"
        )
    vllm_config.load_config = update_config(vllm_config.load_config, overrides.get("load_config", {}))
