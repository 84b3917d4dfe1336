"""Checks, before a request is queued, that its rules allow a token and that its prompt fits the engine."""

import math

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from model_runner_base.errors import RequestError


def check_rules(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if fields contradict each other, or together forbid every token at the first step."""
    if params.prompt_logprobs is not None and params.skip_reading_prefix_cache is False:
        raise RequestError(
            "prompt_logprobs need every token of the prompt computed, and with skip_reading_prefix_cache=False the "
            "prefix cache may have some: leave it out"
        )
    words = params.bad_words_token_ids or ()
    forbidden = {
        "bad_words": {word[0] for word in words if len(word) == 1},
        "logit_bias": {token for token, bias in (params.logit_bias or {}).items() if bias == -math.inf},
        "min_tokens": params.all_stop_token_ids if params.min_tokens else set(),
    }
    if params.allowed_token_ids is None and sum(map(len, forbidden.values())) < vocab_size:
        return
    left = set(params.allowed_token_ids or range(vocab_size))
    rules = ["allowed_token_ids"] if params.allowed_token_ids is not None else []
    for name, tokens in forbidden.items():
        if not left.isdisjoint(tokens):
            rules.append(name)
            left -= tokens
    if not left:
        raise RequestError(f"no token is left that {', '.join(rules)} allow: relax one of them")


def check_session(is_session: bool, vllm_config: VllmConfig) -> None:
    """Raises RequestError for a streaming session where an engine has pipeline stages: rows of a session that waits
    for input could not be told from those of a batch that is not in the step."""
    if is_session and vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise RequestError("sessions of several inputs are not supported with pipeline stages yet: send whole prompts")


def check_fits(num_tokens: int, vllm_config: VllmConfig) -> None:
    """Raises RequestError for a prompt that no step can ever take, since it would wait forever."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if not scheduler.enable_chunked_prefill and num_tokens > scheduler.max_num_batched_tokens:
        raise RequestError(
            f"a prompt of {num_tokens} tokens is more than max_num_batched_tokens={scheduler.max_num_batched_tokens}, "
            "and prompts are not cut here (enable_chunked_prefill is off): shorten it, or raise max_num_batched_tokens"
        )
    if not cache.num_gpu_blocks or _frees_blocks(vllm_config):
        return
    # One block is the null block, which no request gets. Each rank of a group has a part of a request's tokens.
    num_parts = vllm_config.parallel_config.decode_context_parallel_size
    num_places = (cache.num_gpu_blocks - 1) * cache.block_size * num_parts
    if num_tokens > num_places:
        raise RequestError(
            f"a prompt of {num_tokens} tokens does not fit the KV cache, whose {cache.num_gpu_blocks - 1} blocks hold "
            f"{num_places} tokens: shorten it, or raise num_gpu_blocks_override or kv_cache_memory_bytes"
        )


def _frees_blocks(vllm_config: VllmConfig) -> bool:
    """Whether every layer may see only a part of the tokens, so that a request need not hold all of its blocks."""
    model = vllm_config.model_config
    if model.is_attention_free or (model.runner_type == "pooling" and model.attn_type == "encoder_only"):
        return True  # Nothing is kept.
    config = vllm_config.model_config.hf_text_config
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return "full_attention" not in kinds
    names = ("sliding_window", "attention_chunk_size")
    return vllm_config.model_config.is_encoder_decoder or any(getattr(config, name, None) for name in names)
