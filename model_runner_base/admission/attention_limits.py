"""Limits of attention by other rows than keys and values of equal heads: what is refused before the engine is up."""

from vllm.config import ModelConfig, VllmConfig

from model_runner_base.errors import refuse
from model_runner_base.vllm_compat.patches.without_indexer import hides_keys, num_indexed_keys
from model_runner_base.vllm_compat.probes.config import setting
from model_runner_base.vllm_compat.probes.experts import ZeroExpertRouter
from model_runner_base.vllm_compat.probes.indexers import draft_with_indexer, misread_rotation, misread_sharing
from model_runner_base.vllm_compat.probes.models import (
    LAYER_TYPES,
    chooses_blocks,
    has_unequal_heads,
    is_deepseek_v4,
    is_minimax_m3,
    misread_positions,
    other_layer_type,
    tokens_per_entry,
)
from model_runner_base.vllm_compat.probes.multimodal import takes_items
from model_runner_base.vllm_compat.types.speculation import HOST_METHODS

WITH_LATENTS = (*HOST_METHODS, "mtp")
"""Speculative methods that are supported with latent attention."""
HY_V4 = "HYV4ForCausalLM"
WITH_INDEXERS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", HY_V4)
"""Architectures with an indexer that are tested: up to as many tokens as it leaves keys, where they are dense, and
beyond."""
KEPT_AS_THEY_ARE = (None, "auto", "bf16", "bfloat16")
"""Settings of vLLM for an indexer's cache that say no more than that its keys are not quantised."""
ALWAYS_OF_M3 = {
    "use_gemma_norm": True,
    "attention_output_gate": False,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
}
"""Settings of MiniMax M3 that vLLM's class passes over, with the values that it has."""
OF_TRANSFORMERS_M3 = ("index_topk_blocks", "index_block_size", "index_n_heads", "layer_types")
"""Settings of MiniMax M3's sparse layers as transformers names them."""
PUBLISHED_OF_HY_V4 = {
    "enable_ihc": True,
    "gated_mla": True,
    "gating_type": "elementwise",
    "learnable_sink": True,
    "swiglu_limit": 10.0,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": False,
}
"""Settings of HY V4 with the values that are tested; vLLM's class passes over the last three."""
PUBLISHED_OF_DEEPSEEK_V4 = {
    "head_dim": 512,
    "index_head_dim": 128,
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "attention_bias": False,
    "hidden_act": "silu",
}
"""Settings of DeepSeek V4 with the values that are tested; vLLM's class makes the first two alone, and passes over
others."""
SPARSE_OF_HY_V4 = ("indexed_attention", "deepseek_sparse_attention", "sparse_attention", "sparse")
"""Layer types of HY V4 whose tokens see chosen keys."""
DRAFTS_BY_SEVERAL = ("Step3p5ForCausalLM",)
"""Architectures that draft each token by a layer of its own; the base's drafts come from one."""
LONGCAT = "LongcatFlashForCausalLM"
"""The architecture with zero experts, which return their input, that is tested; in releases whose router knows them."""


def check_attention(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for what a model's kind of attention is not served with."""
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    _check_layer_types(vllm_config)
    if model.use_mla or model.architecture in WITH_INDEXERS:
        _check_sparse(vllm_config)
    if model.use_mla:
        _check_latent(vllm_config)
    if is_minimax_m3(model.architecture):
        _check_minimax_m3(vllm_config)
    if model.architecture == HY_V4:
        _check_hy_v4(vllm_config)
    if is_deepseek_v4(model.architecture):
        _check_deepseek_v4(vllm_config)
    if chooses_blocks(model):
        _check_chosen_blocks(vllm_config)
    if model.architecture in DRAFTS_BY_SEVERAL or has_unequal_heads(model.architecture, model.hf_text_config):
        refusals = {
            f"drafts by mtp are not supported with {model.architecture} yet: use one of {', '.join(HOST_METHODS)}, or "
            "leave out speculative_config": drafts and drafts.method == "mtp",
        }
        refuse(refusals)


def _check_layer_types(vllm_config: VllmConfig) -> None:
    """Refuses layers that vLLM's Transformers backend would have see other keys."""
    layer_type = other_layer_type(vllm_config.model_config)
    refusals = {
        f"layers of type {layer_type} are not supported by vLLM's Transformers backend, whose layers are of "
        f"{' and '.join(LAYER_TYPES)}: use a model that vLLM has a class of its own for": layer_type is not None,
    }
    refuse(refusals)


def _check_sparse(vllm_config: VllmConfig) -> None:
    """Refuses models with an indexer (sparse attention, DSA) that were not tried, and settings that its hidden keys
    are not served with."""
    model = vllm_config.model_config
    if num_indexed_keys(model) is None:
        return
    refusals = {
        f"sparse attention (DSA) of {model.architecture} is not supported yet: use a model of dense latent attention, "
        f"or one of {', '.join(WITH_INDEXERS)}": model.architecture not in WITH_INDEXERS,
        "models with an indexer (DSA) keep latents alone: leave out VLLM_MLA_DISABLE": not model.use_mla,
    }
    refuse(refusals)
    # vLLM 0.16 turns any format of 8 bits to this one, also where the model is dense.
    refusals = {
        "caches of 8 bits are not supported with sparse attention (DSA) yet, of any length on this vLLM: leave out "
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype == "fp8_ds_mla",
    }
    refuse(refusals)
    draft = draft_with_indexer(vllm_config)
    if hides_keys(model) or (draft and hides_keys(draft)):
        _check_draft(model, draft)
        _check_hidden_keys(vllm_config)


def _check_draft(model: ModelConfig, draft: ModelConfig | None) -> None:
    """Refuses a model's own layers that draft if their indexer would run otherwise than the model's."""
    if draft is None:
        return
    counts = [num_indexed_keys(config) for config in (model, draft)]
    rotation = misread_rotation(draft.hf_text_config, model.architecture)
    not_passed_on = "a draft by mtp reads config.json without hf_overrides"
    refusals = {
        f"index_topk of the model is {counts[0]}, and that of its draft is {counts[1]}, since {not_passed_on}: correct "
        "config.json, or leave out speculative_config": counts[0] != counts[1],
        f"the indexer of the draft rotates as indexer_rope_interleave says, which published code of "
        f"{model.architecture} has as {rotation}, and {not_passed_on}: correct config.json, or leave out "
        "speculative_config": rotation is not None,
        f"requests of up to {model.max_model_len} tokens need the indexer, and drafts of {draft.max_model_len} do "
        "not: leave out max_model_len of speculative_config": hides_keys(model) != hides_keys(draft),
    }
    refuse(refusals)


def _check_hidden_keys(vllm_config: VllmConfig) -> None:
    """Refuses what an indexer that hides keys is not served with; up to ``index_topk`` tokens it does not run."""
    model = vllm_config.model_config
    dense = f"set max_model_len={num_indexed_keys(model)} or less (index_topk), where {model.architecture} is dense"
    config = model.hf_text_config
    rotation, sharing = misread_rotation(config, model.architecture), misread_sharing(config, model.architecture)
    refusals = {
        f"sparse attention (DSA) is not cut over ranks or stages yet: leave out tensor_parallel_size and "
        f"pipeline_parallel_size, or {dense}": vllm_config.parallel_config.world_size > 1,
        f"adapters are not supported with sparse attention (DSA) yet: leave out enable_lora, or {dense}": (
            vllm_config.lora_config
        ),
        f"caches of 8 bits are not supported with sparse attention (DSA) yet: leave out kv_cache_dtype, or {dense}": (
            vllm_config.cache_config.cache_dtype.startswith("fp8")
        ),
        "an indexer's keys are kept in the model's dtype: leave out indexer_kv_dtype": (
            setting(vllm_config, "attention_config.indexer_kv_dtype") not in KEPT_AS_THEY_ARE
        ),
        f"caches of sparse attention (DSA) are not transferred yet: leave out kv_transfer_config, or {dense}": (
            setting(vllm_config, "kv_transfer_config")
        ),
        f"vLLM's {model.architecture} reads the order of an indexer's rotary numbers from indexer_rope_interleave, "
        f"which published code has as {rotation}: correct config.json, or pass "
        f'hf_overrides={{"indexer_rope_interleave": {rotation}}}': rotation is not None,
        f"{sharing}: correct config.json, or pass hf_overrides, or {dense}": sharing is not None,
    }
    refuse(refusals)


def _check_hy_v4(vllm_config: VllmConfig) -> None:
    """Refuses what was not tried of HY V4, and settings that vLLM's class passes over."""
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    config = model.hf_text_config
    others = [name for name, value in PUBLISHED_OF_HY_V4.items() if getattr(config, name, value) != value]
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    not_sparse = next((layer for layer, type_ in enumerate(types) if type_ not in SPARSE_OF_HY_V4), None)
    refusals = {
        f"HY V4 is served as published, which has {', '.join(others)} otherwise: correct config.json": others,
        f"rotary positions of type {kind} are not supported with HY V4 yet: correct rope_parameters of config.json": (
            kind != "default"
        ),
        f"vLLM's class has layer {not_sparse} of HY V4 see all keys, as layer_types says: correct config.json, or pass "
        f'hf_overrides with layer_types of {config.num_hidden_layers} times "indexed_attention"': (
            hides_keys(model) and not_sparse is not None
        ),
        "HY V4 is not cut over ranks or stages yet: leave out tensor_parallel_size and pipeline_parallel_size": (
            vllm_config.parallel_config.world_size > 1
        ),
        "adapters are not supported with HY V4 yet: leave out enable_lora": vllm_config.lora_config,
        f"drafts by {drafts and drafts.method} are not supported with HY V4 yet: use one of "
        f"{', '.join(HOST_METHODS)}, or leave out speculative_config": drafts and drafts.method not in HOST_METHODS,
    }
    refuse(refusals)


def _check_deepseek_v4(vllm_config: VllmConfig) -> None:
    """Refuses what was not tried of DeepSeek V4, and settings that vLLM's class passes over."""
    model, drafts, cache = vllm_config.model_config, vllm_config.speculative_config, vllm_config.cache_config
    config, rate = model.hf_text_config, tokens_per_entry(model)
    others = [name for name, value in PUBLISHED_OF_DEEPSEEK_V4.items() if getattr(config, name, None) != value]
    wanted = ", ".join(f"{name}={PUBLISHED_OF_DEEPSEEK_V4[name]}" for name in others)
    misread = misread_positions(config)
    refusals = {
        f"DeepSeek V4 is served as published, with {wanted}: correct config.json": others,
        f"block_size={cache.block_size} does not hold whole entries of {rate} tokens: use a multiple of {rate}": (
            cache.block_size % rate
        ),
        "DeepSeek V4 is not cut over ranks or stages yet: leave out tensor_parallel_size and pipeline_parallel_size": (
            vllm_config.parallel_config.world_size > 1
        ),
        "token ids choose experts of DeepSeek V4, and prompt embeddings have none: leave out enable_prompt_embeds": (
            model.enable_prompt_embeds
        ),
        f"rotary positions of DeepSeek V4 would not be those of its config, which has {misread}": misread,
        "DeepSeek V4 was not tried in compiled graphs yet: set enforce_eager=True": not model.enforce_eager,
        "adapters are not supported with DeepSeek V4 yet: leave out enable_lora": vllm_config.lora_config,
        "DeepSeek V4 keeps its caches in the model's dtype: leave out kv_cache_dtype": (
            cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch."))
        ),
        "an indexer's keys are kept in the model's dtype: leave out indexer_kv_dtype": (
            setting(vllm_config, "attention_config.indexer_kv_dtype") not in KEPT_AS_THEY_ARE
        ),
        "caches of DeepSeek V4 are not transferred yet: leave out kv_transfer_config": (
            setting(vllm_config, "kv_transfer_config")
        ),
        f"drafts by {drafts and drafts.method} are not supported with DeepSeek V4 yet: use one of "
        f"{', '.join(HOST_METHODS)}, or leave out speculative_config": drafts and drafts.method not in HOST_METHODS,
    }
    refuse(refusals)


def _check_minimax_m3(vllm_config: VllmConfig) -> None:
    """Refuses what was not tried of MiniMax M3, and settings that vLLM's class passes over."""
    config, drafts = vllm_config.model_config.hf_text_config, vllm_config.speculative_config
    others = [name for name, value in ALWAYS_OF_M3.items() if getattr(config, name, value) != value]
    names = [name for name in OF_TRANSFORMERS_M3 if getattr(config, name, None) is not None]
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    refusals = {
        f"vLLM's class of MiniMax M3 passes over {', '.join(others)}, and computes as published: correct config.json": (
            others
        ),
        f"vLLM's class of MiniMax M3 passes over {', '.join(names)}, as transformers writes them: say it in "
        "sparse_attention_config": names,
        f"vLLM's class of MiniMax M3 passes over rotary positions of type {kind}: leave rope_parameters out": (
            kind != "default"
        ),
        f"drafts by {drafts and drafts.method} are not supported with MiniMax M3 yet: use one of "
        f"{', '.join(HOST_METHODS)}, or leave out speculative_config": drafts and drafts.method not in HOST_METHODS,
        "images of MiniMax M3 are not supported yet: use its text alone, with limit_mm_per_prompt 0 for image, "
        "video and audio": takes_items(vllm_config.model_config),
    }
    refuse(refusals)


def _check_chosen_blocks(vllm_config: VllmConfig) -> None:
    """Refuses what attention to chosen blocks (MiniMax M3) is not served with."""
    model = vllm_config.model_config
    name, settings = model.architecture, model.hf_text_config.sparse_attention_config
    kind = settings.get("sparse_score_type", "max")
    sizes = settings.get("sparse_index_dim"), model.get_head_size()
    frequency = settings["sparse_attention_freq"]
    off = settings.get("sparse_disable_index_value") or [1] * len(frequency)
    always = settings.get("sparse_init_block", 0) + settings.get("sparse_local_block", 0)
    refusals = {
        f"{name} is not cut into stages yet: leave out pipeline_parallel_size": (
            vllm_config.parallel_config.pipeline_parallel_size > 1
        ),
        f"caches of 8 bits are not supported with {name} yet: leave out kv_cache_dtype": (
            vllm_config.cache_config.cache_dtype.startswith("fp8")
        ),
        "an indexer's keys are kept in the model's dtype: leave out indexer_kv_dtype": (
            setting(vllm_config, "attention_config.indexer_kv_dtype") not in KEPT_AS_THEY_ARE
        ),
        f"caches of {name} are not transferred yet: leave out kv_transfer_config": (
            setting(vllm_config, "kv_transfer_config")
        ),
        f"scores of {name} are largest products, not sparse_score_type={kind}: correct config.json": kind != "max",
        f"an indexer of {name} has heads of head_dim={sizes[1]} numbers, not sparse_index_dim={sizes[0]}: correct "
        "config.json": sizes[0] != sizes[1],
        f"an indexer of {name} has no values: correct sparse_disable_index_value of config.json": any(
            is_sparse and not is_off for is_sparse, is_off in zip(frequency, off, strict=False)
        ),
        f"{always} blocks are always seen (sparse_init_block, sparse_local_block), and sparse_topk_blocks are fewer: "
        "correct config.json": always > settings.get("sparse_topk_blocks", always),
        "layers of chosen blocks are not switched off by use_sparse_attention: set sparse_attention_freq to zeros in "
        "config.json": not settings.get("use_sparse_attention", True),
    }
    refuse(refusals)


def _check_latent(vllm_config: VllmConfig) -> None:
    """Refuses what latent attention (MLA) does not have yet."""
    model, drafts, lora = vllm_config.model_config, vllm_config.speculative_config, vllm_config.lora_config
    is_longcat = model.architecture.startswith("LongcatFlash")
    is_tested = model.architecture == LONGCAT and ZeroExpertRouter is not None
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    refusals = {
        "fully_sharded_loras are not supported with latent attention (MLA) yet: leave them out": (
            lora and lora.fully_sharded_loras and num_ranks > 1
        ),
        f"{model.architecture} is not supported yet, since some of its experts return their input (zero experts): use "
        f"a model of other experts, or {LONGCAT} on vLLM 0.33": is_longcat and not is_tested,
        f"adapters and drafts by mtp are not supported with {model.architecture} yet: leave out enable_lora and "
        "speculative_config": is_longcat and (lora or (drafts and drafts.method == "mtp")),
        f"drafts by {drafts and drafts.method} are not supported with latent attention (MLA) yet: use one of "
        f"{', '.join(WITH_LATENTS)}, or leave out speculative_config": drafts and drafts.method not in WITH_LATENTS,
    }
    refuse(refusals)
