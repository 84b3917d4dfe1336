"""Limits of the base: features that it does not have yet, and their refusal before any work is done.

A configuration or request that would give wrong results is refused with one line that says what to do instead. When a
feature is built, its line is removed.
"""

import math
from typing import Any

from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from model_runner_base.admission.attention_limits import check_attention
from model_runner_base.admission.decode_context_limits import check_decode_context
from model_runner_base.admission.expert_replica_limits import check_expert_replicas
from model_runner_base.admission.kv_connectors import check_connector
from model_runner_base.admission.multimodal_limits import check_multimodal, check_text_alone
from model_runner_base.admission.pooling_limits import check_pooling
from model_runner_base.admission.request_ranges import SAMPLING, NotYet, check_params, check_prompt
from model_runner_base.errors import UnsupportedConfigError, refuse
from model_runner_base.vllm_compat.probes import multimodal
from model_runner_base.vllm_compat.probes.config import (
    RAY_CALLS_WORKERS,
    asks_for_connector,
    returns_routed_experts,
    setting,
    uses_slot_processors,
)
from model_runner_base.vllm_compat.probes.experts import IS_ONE_MODULE
from model_runner_base.vllm_compat.probes.models import left_out_of_ling
from model_runner_base.vllm_compat.probes.processors import plugins_with_processors, wrong_processors
from model_runner_base.vllm_compat.probes.scheduler import counts_running_adapters
from model_runner_base.vllm_compat.types.kv_cache import keeps_window_blocks
from model_runner_base.vllm_compat.types.recurrent import draft_methods, has_states, keeps_prefixes
from model_runner_base.vllm_compat.types.speculation import read_speculation
from model_runner_base.vllm_compat.types.weight_transfer import WRITING_BACKENDS

RECURRENT_HEADS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_n_heads",
    "mamba_num_heads",
    "n_mamba_heads",
)
RECURRENT_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
HEADS_OF_WHOLE_MODELS = {
    "mamba": "intermediate_size",
    "falcon_mamba": "intermediate_size",
    "mamba2": "num_heads",
    "lfm2": "hidden_size",
    "lfm2_moe": "hidden_size",
}
"""Fields of heads or channels, by type of model, that mean something else in other models."""


def check_recurrent_ranks(config: Any, ranks: int) -> None:
    """Raises UnsupportedConfigError for a model, given its config, whose recurrent layers ``ranks`` cannot share.

    A rank has its part of the heads, or of the channels of Mamba and of short convolutions, with their states. Groups
    of Mamba 2 are cut like heads, but a single group is on every rank.
    """
    shared = [*RECURRENT_HEADS, *filter(None, [HEADS_OF_WHOLE_MODELS.get(config.model_type)])]
    counts = {name: getattr(config, name, None) for name in [*shared, *RECURRENT_GROUPS]}
    if config.model_type == "kimi_linear":
        counts["linear_attn_config.num_heads"] = (config.linear_attn_config or {}).get("num_heads")
    for name, count in counts.items():
        is_on_every_rank = name in RECURRENT_GROUPS and count == 1
        if count and count % ranks and not is_on_every_rank:
            raise UnsupportedConfigError(
                f"recurrent layers with {name}={count} are not cut over {ranks} ranks: use a tensor_parallel_size that "
                "divides it"
            )


NEWER_PARAMS = tuple(name for name, rule in SAMPLING.items() if isinstance(rule, NotYet))
"""Refused fields of ``SamplingParams``, which newer releases of vLLM have."""
SPECULATIVE_METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa")

ENCODER_DECODER_ARCHITECTURES = ("WhisperForConditionalGeneration",)
"""Encoder-decoder architectures whose encoder outputs have one length, and whose cross-attention layers project them by
a ``kv_proj``."""
RECURRENT_ARCHITECTURES = (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxText01ForCausalLM",
    "NemotronHForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Zamba2ForCausalLM",
)
"""Architectures with recurrent layers whose tokens are held against another implementation."""
RECURRENT_WITH_ADAPTERS = (
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "Lfm2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
)
"""Architectures with recurrent layers whose adapters are held against merged weights."""

STAGED_MULTIMODAL = ("Qwen3VLForConditionalGeneration",)
"""Multimodal architectures whose tokens with images were compared over pipeline stages."""

CUTS_EXPERTS = ("AriaForConditionalGeneration", "DbrxForCausalLM")
"""Architectures whose class in vLLM loads experts cut over the ranks, also with expert parallelism."""


def check_config(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for the first setting that this runner does not serve."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    wrong = wrong_processors(vllm_config)
    refusals = {
        "encoder-cache transfer is not supported yet: leave out ec_transfer_config": vllm_config.ec_transfer_config,
        "KV-sharing fast prefill is not supported yet: leave out kv_sharing_fast_prefill": (
            vllm_config.cache_config.kv_sharing_fast_prefill
        ),
        f"weight transfer by {', '.join(WRITING_BACKENDS)} is not supported: use a backend that calls the model's"
        " load_weights, such as gloo": setting(vllm_config, "weight_transfer_config.backend") in WRITING_BACKENDS,
        "micro-batching is not supported yet: leave out enable_dbo and ubatch_size": parallel.use_ubatching,
        "prefill context parallelism is not supported yet: use prefill_context_parallel_size=1": (
            parallel.prefill_context_parallel_size > 1
        ),
        "experts are not moved between ranks yet: leave out enable_eplb and eplb_config": parallel.enable_eplb,
        "expert parallelism is not supported with pipeline stages yet: leave out enable_expert_parallel, experts are"
        " then cut like other layers": parallel.enable_expert_parallel and parallel.pipeline_parallel_size > 1,
        f"{model and model.architecture} cuts its experts itself, so no rank has whole ones: leave out "
        "enable_expert_parallel": parallel.enable_expert_parallel and model and model.architecture in CUTS_EXPERTS,
        "sequence parallelism is not supported yet: leave enable_sp and fuse_gemm_comms out of pass_config": (
            setting(vllm_config, "compilation_config.pass_config.enable_sp", False)
        ),
        "routed experts are not returned yet: leave out enable_return_routed_experts": (
            returns_routed_experts(vllm_config)
        ),
        f"{', '.join(wrong)}: logits processors with the interface of vLLM's first model runner "
        "are not supported with its second: set VLLM_USE_V2_MODEL_RUNNER=0": wrong,
        # Settings that only newer releases of vLLM have.
        f"sleep_mode_backend={setting(vllm_config.model_config, 'sleep_mode_backend')} is not supported: leave it out, "
        "the device frees and takes back its own memory": (
            setting(vllm_config.model_config, "sleep_mode_backend", "cumem") != "cumem"
        ),
        "watermarks are not supported yet: leave out watermark_config": setting(vllm_config, "watermark_config"),
        "diffusion models are not supported yet: leave out diffusion_config": setting(vllm_config, "diffusion_config"),
        "engrams are not supported yet: leave out engram_config": setting(vllm_config, "engram_config"),
        "caches of sparse attention on the host are not supported yet: leave out hisparse_config": (
            setting(vllm_config, "attention_config.hisparse_config")
        ),
        "prefix-cache hits in parts of a block are not supported yet: leave out prefix_match_unit": (
            setting(vllm_config, "cache_config.prefix_match_unit")
        ),
        "sampling masks are not returned yet: leave out return_sampling_mask": (
            setting(model, "return_sampling_mask", False)
        ),
        "traces are not replayed yet: leave out enable_trace_replay": setting(model, "enable_trace_replay", False),
        "noise of 64 bits is not drawn yet: leave out use_fp64_gumbel": setting(model, "use_fp64_gumbel", False),
        "sampling in shards of a batch is not supported yet: leave out enable_batch_sharded_sampling": (
            setting(parallel, "enable_batch_sharded_sampling", False)
        ),
        "elastic ranks and fault tolerance are not supported yet: leave out enable_elastic_ep and"
        " enable_fault_tolerance": (
            setting(parallel, "enable_elastic_ep", False) or setting(parallel, "enable_fault_tolerance", False)
        ),
    }
    refuse(refusals)
    if parallel.decode_context_parallel_size > 1:
        check_decode_context(vllm_config)
    if parallel.pipeline_parallel_size > 1:
        _check_stages(vllm_config)
    if parallel.data_parallel_size > 1:
        _check_replicas(vllm_config)
    check_connector(vllm_config)
    if model and model.runner_type == "pooling":
        check_pooling(vllm_config)
    if has_states(vllm_config):
        _check_recurrent(vllm_config)
    if model:
        refuse(left_out_of_ling(model.architecture, model.hf_text_config))
        check_attention(vllm_config)
    if model and model.is_encoder_decoder:
        _check_encoder_decoder(vllm_config)
    if vllm_config.speculative_config is not None:
        _check_speculation(vllm_config)
    if model and multimodal.takes_items(model):
        check_multimodal(vllm_config)
    elif model and model.is_multimodal_model:
        check_text_alone(model)


def _check_stages(vllm_config: VllmConfig) -> None:
    """Refuses what stages of a pipeline do not have yet; without a model only how they are started is checked."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    refusals = {
        "pipeline stages do not run on this device yet: use pipeline_parallel_size=1 and more tensor_parallel_size": (
            not getattr(current_platform, "serves_stages", False)
        ),
        f"pipeline stages are not started by {parallel.distributed_executor_backend} on this release: set "
        "distributed_executor_backend to mp": (
            parallel.distributed_executor_backend not in ("mp", "ray")
            or (parallel.distributed_executor_backend == "ray" and not RAY_CALLS_WORKERS)
        ),
        "mp starts pipeline stages on one host alone: use nnodes=1, or distributed_executor_backend=ray where this "
        "release has stages by Ray": setting(parallel, "nnodes", 1) > 1,
        "KV connectors are not supported with pipeline stages yet: leave out kv_transfer_config and "
        "kv_offloading_size": asks_for_connector(vllm_config),
        "speculative decoding is not supported with pipeline stages yet: leave out speculative_config": (
            vllm_config.speculative_config
        ),
        "on this release pipeline stages serve neither adapters, pooling, images nor recurrent layers: use vLLM 0.33, "
        "or pipeline_parallel_size=1": not counts_running_adapters() and _is_more_than_text(vllm_config),
        "adapters were not tried with recurrent layers and pipeline stages: leave out enable_lora, or use "
        "pipeline_parallel_size=1": vllm_config.lora_config and has_states(vllm_config),
        "weights of a trainer are not received by pipeline stages yet: leave out weight_transfer_config": (
            setting(vllm_config, "weight_transfer_config")
        ),
        "sharded state has no names for the parts of pipeline stages: leave out load_format=sharded_state": (
            setting(vllm_config, "load_config.load_format") == "sharded_state"
        ),
    }
    refuse(refusals)
    if model is not None:
        _check_staged_model(model, vllm_config.lora_config is not None)
        _check_staged_tower(model, parallel.pipeline_parallel_size)


def _is_more_than_text(vllm_config: VllmConfig) -> bool:
    """Whether stages need more than hidden states and tokens of text.

    That was tried with releases alone whose scheduler counts the adapters of all batches that stages work on.
    """
    model = vllm_config.model_config
    if model is None:
        return vllm_config.lora_config is not None
    is_other = model.runner_type == "pooling" or multimodal.takes_items(model) or has_states(vllm_config)
    return is_other or vllm_config.lora_config is not None


def _check_replicas(vllm_config: VllmConfig) -> None:
    """Refuses replicas that are not independent engines of a server on their host. In the process of a replica there is
    nothing to check, since its config names no others."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    is_balanced_elsewhere = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
    others = parallel.distributed_executor_backend in ("ray", "external_launcher")
    refusals = {
        "replicas (data parallelism) do not run on this device yet: use data_parallel_size=1": (
            not getattr(current_platform, "serves_replicas", False)
        ),
        f"{model and model.architecture} has experts, which replicas share under one server: leave out "
        "data_parallel_rank, data_parallel_size_local and options of external and hybrid load balancing": (
            model
            and model.is_moe
            and (is_balanced_elsewhere or parallel.data_parallel_size_local != parallel.data_parallel_size)
        ),
        "a server would not see the end of a replica on another host: start a server on each host, with "
        "data_parallel_start_rank and data_parallel_size_local of its own replicas, and leave out headless": (
            not is_balanced_elsewhere and parallel.data_parallel_size_local != parallel.data_parallel_size
        ),
        "replicas are processes of their own, not started by Ray or external_launcher: leave out "
        "distributed_executor_backend and data_parallel_backend": others or parallel.data_parallel_backend != "mp",
        "KV connectors are not supported with replicas yet: leave out kv_transfer_config and kv_offloading_size": (
            asks_for_connector(vllm_config)
        ),
        "pipelines are not replicated yet: use data_parallel_size=1 or pipeline_parallel_size=1": (
            parallel.pipeline_parallel_size > 1
        ),
    }
    refuse(refusals)
    if model and model.is_moe:
        check_expert_replicas(vllm_config)


def _check_staged_tower(model: ModelConfig, num_stages: int) -> None:
    """Refuses a first stage without a layer for each output of a tower's inner layers, as vLLM's class asks for."""
    vision = getattr(model.hf_config, "vision_config", None)
    needed = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    if needed and num_stages > 1:
        first = get_pp_indices(model.hf_text_config.num_hidden_layers, 0, num_stages)[1]
        refusals = {
            f"the first pipeline stage has {first} layers, and the tower adds to the first {needed}: use a smaller "
            "pipeline_parallel_size, or VLLM_PP_LAYER_PARTITION": first < needed,
        }
        refuse(refusals)


def _check_staged_model(model: ModelConfig, has_adapters: bool) -> None:
    name, pools, takes_items = model.architecture, model.runner_type == "pooling", multimodal.takes_items(model)
    refusals = {
        f"{name} pools in layers of its own, which was not tried with pipeline stages: use pipeline_parallel_size=1": (
            pools and model.convert_type == "none"
        ),
        f"attention in both directions, as {name} has, is not cut into pipeline stages yet: use "
        "pipeline_parallel_size=1": pools and model.attn_type == "encoder_only",
        "a classifier whose weights are those of the vocabulary's tokens (classifier_from_token) is not supported with "
        "pipeline stages: use "
        "pipeline_parallel_size=1": pools and getattr(model.hf_text_config, "classifier_from_token", None),
        "adapters of pooling models are not supported with pipeline stages yet: leave out enable_lora": (
            pools and has_adapters
        ),
        f"images and other items of {name} were not tried with pipeline stages: use pipeline_parallel_size=1, the "
        f"model's text alone (limit_mm_per_prompt), or one of {', '.join(STAGED_MULTIMODAL)}": (
            takes_items and not model.is_encoder_decoder and name not in STAGED_MULTIMODAL
        ),
        "vectors of images were not tried with pipeline stages: use pipeline_parallel_size=1": pools and takes_items,
        "adapters were not tried with images and pipeline stages: leave out enable_lora, or use "
        "pipeline_parallel_size=1": takes_items and has_adapters,
        "encoder-decoder models are not supported with pipeline stages yet: use pipeline_parallel_size=1": (
            model.is_encoder_decoder
        ),
        "prompt embeddings are not supported with pipeline stages yet: leave out enable_prompt_embeds": (
            model.enable_prompt_embeds
        ),
        "pipeline stages do not sleep yet: leave out enable_sleep_mode": model.enable_sleep_mode,
    }
    refuse(refusals)


def _check_speculation(vllm_config: VllmConfig) -> None:
    config = vllm_config.speculative_config
    assert config is not None
    plugins = plugins_with_processors()
    chain = str([(0,) * (length + 1) for length in range(config.num_speculative_tokens)])
    refusals = {
        f"speculative method {config.method} is not supported yet: use one of {', '.join(SPECULATIVE_METHODS)}": (
            config.method not in SPECULATIVE_METHODS
        ),
        f"parallel drafting is not supported with method {config.method}: use draft_model or eagle3": (
            config.parallel_drafting and config.method not in ("draft_model", "eagle3")
        ),
        "token trees are not supported: leave speculative_token_tree out of speculative_config": (
            setting(config, "speculative_token_tree", chain) != chain
        ),
        "a number of drafts for each batch size is not supported yet: leave out "
        "num_speculative_tokens_per_batch_size": setting(config, "num_speculative_tokens_per_batch_size"),
        "a draft model with a vocabulary of its own is not supported yet: leave out use_heterogeneous_vocab": (
            setting(config, "use_heterogeneous_vocab", False)
        ),
        "a quantised copy of lm_head is not supported yet: leave out draft_lm_head_quantization": (
            setting(config, "draft_lm_head_quantization")
        ),
        f"rejection_sample_method={setting(config, 'rejection_sample_method')} is not supported: a draft is accepted "
        "if it is what would have been drawn; leave it out": (
            setting(config, "rejection_sample_method", "standard") != "standard"
        ),
        f"{', '.join(plugins)}: logits processors from plugins are not supported with speculative decoding, where "
        "vLLM leaves them out: uninstall them, or leave out speculative_config": bool(
            plugins and not uses_slot_processors(vllm_config)
        ),
        f"draft_tensor_parallel_size={_size_of(config.draft_parallel_config)} is not supported: the draft model is "
        f"split like the target, over tensor_parallel_size={_size_of(config.target_parallel_config)}; leave it out": (
            _size_of(config.draft_parallel_config) not in (None, _size_of(config.target_parallel_config))
        ),
        "prompt embeddings are not supported with speculative decoding: leave out enable_prompt_embeds": (
            vllm_config.model_config.enable_prompt_embeds
        ),
    }
    refuse(refusals)
    try:
        read_speculation(vllm_config)
    except ValueError as error:
        raise UnsupportedConfigError(str(error)) from None


def _check_recurrent(vllm_config: VllmConfig) -> None:
    """Refuses what recurrent layers do not have yet, and models that vLLM computes otherwise than their authors."""
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    config, methods = model.hf_text_config, draft_methods(model)
    refusals = {
        f"{model.architecture} is not supported yet: use a model of attention layers, or one of "
        f"{', '.join(RECURRENT_ARCHITECTURES)}": model.architecture not in RECURRENT_ARCHITECTURES,
        f"drafts by {drafts and drafts.method} are not supported with {model.architecture} yet: use one of "
        f"{', '.join(methods)}, or leave out speculative_config": drafts and drafts.method not in methods,
        f"adapters are not supported with {model.architecture} yet: leave out enable_lora, or use one of "
        f"{', '.join(RECURRENT_WITH_ADAPTERS)}": vllm_config.lora_config
        and model.architecture not in RECURRENT_WITH_ADAPTERS,
        "adapters are not supported with recurrent layers that ranks share yet: leave out enable_lora, or use "
        "tensor_parallel_size=1": vllm_config.lora_config and vllm_config.parallel_config.tensor_parallel_size > 1,
        "states of recurrent layers are given out by the base's own scheduler: leave out scheduler_cls": (
            not getattr(vllm_config.scheduler_config.get_scheduler_cls(), "gives_states", False)
        ),
        "drafts would be verified after this scheduler has freed states that a step may go back to: leave out "
        "scheduler_cls, or set async_scheduling=False or enable_prefix_caching=False": (
            keeps_prefixes(vllm_config)
            and read_speculation(vllm_config).unread
            and not keeps_window_blocks(vllm_config)
        ),
        "max_model_len=-1 is fitted to a KV cache, which this model has none of: give max_model_len": (
            model.is_attention_free and model.max_model_len <= 0
        ),
        "convolutions keep their inputs in the model's dtype: leave out mamba_cache_dtype": (
            vllm_config.cache_config.mamba_cache_dtype != "auto"
        ),
        **_computed_otherwise(config),
    }
    refuse(refusals)
    check_recurrent_ranks(config, vllm_config.parallel_config.tensor_parallel_size)


def _computed_otherwise(config: Any) -> dict[str, Any]:
    """Refusals of recurrent models that vLLM, or this library, computes otherwise than their authors."""
    kind, limit = config.model_type, getattr(config, "time_step_limit", None)
    # Zamba 2 has hidden_act for its other layers alone.
    activation = (
        "silu" if kind == "zamba2" else getattr(config, "mamba_hidden_act", getattr(config, "hidden_act", "silu"))
    )
    further = _further_kimi_fields(config) if kind == "kimi_linear" else []
    half = config.hidden_size // config.num_attention_heads // 2 if kind == "bamba" else 0
    return {
        "vLLM shares the embeddings of LFM2 with its head, and this checkpoint does not (tie_word_embeddings): use a "
        "checkpoint that does": kind in ("lfm2", "lfm2_moe") and not config.tie_word_embeddings,
        "vLLM applies the gate of Falcon-H1 after its norm, and this checkpoint before it: use a checkpoint without "
        "mamba_norm_before_gate": (
            kind == "falcon_h1" and config.mamba_rms_norm and getattr(config, "mamba_norm_before_gate", True)
        ),
        "this release of vLLM has experts without a gate on some devices alone: use vLLM 0.33, or a Nemotron-H "
        "without experts": IS_ONE_MODULE and kind == "nemotron_h" and "E" in config.hybrid_override_pattern,
        "vLLM adds the layers of MiniMax to their inputs before a norm, unless the config has postnorm, and "
        "transformers to those after it: set postnorm to true in config.json": (
            kind.startswith("minimax") and not getattr(config, "postnorm", False)
        ),
        f"Bamba rotates half of each head, and vLLM attn_rotary_emb numbers of it: set that to {half} in config.json": (
            kind == "bamba" and getattr(config, "attn_rotary_emb", None) != half
        ),
        "decays of Kimi-Linear are not limited from below: use a checkpoint without gate_lower_bound": (
            kind == "kimi_linear" and (config.linear_attn_config or {}).get("gate_lower_bound") is not None
        ),
        f"Kimi-Linear is computed as published: use a checkpoint without {', '.join(further)}": further,
        "recurrent layers are computed with SiLU: use a checkpoint whose hidden_act is silu": (
            activation not in ("silu", "swish")
        ),
        "time steps of recurrent layers are not limited: use a checkpoint whose time_step_limit is [0, Infinity]": (
            limit is not None and tuple(limit) != (0.0, math.inf)
        ),
    }


def _further_kimi_fields(config: Any) -> list[str]:
    """Names of fields with which later models of Kimi-Linear's class have layers of other kinds."""
    names = ("attn_res_block_size", "routed_expert_hidden_size", "mla_use_output_gate")
    found = [name for name in names if getattr(config, name, None)]
    return [*found, "use_full_rank_gate"] if (config.linear_attn_config or {}).get("use_full_rank_gate") else found


def _check_encoder_decoder(vllm_config: VllmConfig) -> None:
    """Refuses settings of encoder-decoder models, in addition to those of multimodal models, which they are to vLLM."""
    model = vllm_config.model_config
    refusals = {
        f"{model.architecture} is not supported yet: use a decoder-only model, or one of "
        f"{', '.join(ENCODER_DECODER_ARCHITECTURES)}": model.architecture not in ENCODER_DECODER_ARCHITECTURES,
        "prefix caching is not supported with encoder-decoder models: leave out enable_prefix_caching": (
            vllm_config.cache_config.enable_prefix_caching
        ),
        "adapters are not supported with encoder-decoder models yet: leave out enable_lora": vllm_config.lora_config,
        "speculative decoding is not supported with encoder-decoder models yet: leave out speculative_config": (
            vllm_config.speculative_config
        ),
    }
    refuse(refusals)


def _size_of(parallel_config: ParallelConfig | None) -> int | None:
    return None if parallel_config is None else parallel_config.tensor_parallel_size


def check_request(params: SamplingParams | PoolingParams, token_ids: list[int], vocab_size: int) -> None:
    """Raises RequestError, a ValueError that the API server answers with status 400.

    It refuses parameters out of their ranges (``admission/request_ranges.py``) and ids that are no tokens.
    """
    check_prompt(token_ids, vocab_size)
    check_params(params, vocab_size)
