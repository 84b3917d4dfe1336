"""What the base cannot do yet, said before any work is done.

A configuration or request that would come out wrong is refused here with one line that says what to do. A feature that
is built takes its line away.
"""

from importlib.metadata import entry_points

from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_port.config import returns_routed_experts, uses_sequence_parallelism
from model_runner_base.vllm_port.speculation import read_speculation

SPECULATIVE_METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa")

MULTIMODAL_ARCHITECTURES = (
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
)
"""Those whose images are held against another implementation; of others it is not known what they need."""


def check_config(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for the first setting that this runner does not serve."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    refusals = {
        # Before KV transfer, which vLLM makes of it.
        "KV offloading is not supported yet: leave out kv_offloading_size": (
            vllm_config.cache_config.kv_offloading_size is not None
        ),
        "KV transfer is not supported yet: leave out kv_transfer_config": vllm_config.kv_transfer_config,
        "encoder-cache transfer is not supported yet: leave out ec_transfer_config": vllm_config.ec_transfer_config,
        "KV-sharing fast prefill is not supported yet: leave out kv_sharing_fast_prefill": (
            vllm_config.cache_config.kv_sharing_fast_prefill
        ),
        "micro-batching is not supported yet: leave out enable_dbo and ubatch_size": parallel.use_ubatching,
        "pipeline parallelism is not supported yet: use pipeline_parallel_size=1 and more tensor_parallel_size": (
            parallel.pipeline_parallel_size > 1
        ),
        "data parallelism is not supported yet: use data_parallel_size=1": parallel.data_parallel_size > 1,
        "context parallelism is not supported yet: use prefill_context_parallel_size=1 and"
        " decode_context_parallel_size=1": (
            max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) > 1
        ),
        "expert parallelism is not supported yet: leave out enable_expert_parallel, experts are then cut like other"
        " layers": parallel.enable_expert_parallel,
        "sequence parallelism is not supported yet: leave enable_sp and fuse_gemm_comms out of pass_config": (
            uses_sequence_parallelism(vllm_config)
        ),
        "pooling models are not supported yet: use a model that generates": model and model.runner_type == "pooling",
        "encoder-decoder models are not supported yet": model and model.is_encoder_decoder,
        "models with multi-head latent attention (MLA) are not supported yet": model and model.use_mla,
        "layers with a recurrent state (Mamba, linear attention, convolution) are not supported yet: serve a model of"
        " attention layers": model and _has_recurrent_layers(model),
        "routed experts are not returned yet: leave out enable_return_routed_experts": (
            returns_routed_experts(vllm_config)
        ),
    }
    for message, is_asked in refusals.items():
        if is_asked:
            raise UnsupportedConfigError(message)
    if vllm_config.speculative_config is not None:
        _check_speculation(vllm_config)
    if model and model.is_multimodal_model:
        _check_multimodal(vllm_config)


def _check_speculation(vllm_config: VllmConfig) -> None:
    config = vllm_config.speculative_config
    assert config is not None
    chain = str([(0,) * (length + 1) for length in range(config.num_speculative_tokens)])
    refusals = {
        f"speculative method {config.method} is not supported yet: use one of {', '.join(SPECULATIVE_METHODS)}": (
            config.method not in SPECULATIVE_METHODS
        ),
        f"parallel drafting is not supported with method {config.method}: use draft_model or eagle3": (
            config.parallel_drafting and config.method not in ("draft_model", "eagle3")
        ),
        "token trees are not supported: leave speculative_token_tree out of speculative_config": (
            config.speculative_token_tree not in (None, chain)
        ),
        f"{', '.join(_plugins())}: logits processors from plugins are not supported with speculative decoding, where "
        "vLLM leaves them out: uninstall them, or leave out speculative_config": bool(_plugins()),
        f"draft_tensor_parallel_size={_size_of(config.draft_parallel_config)} is not supported: what drafts is cut "
        f"like the target, over tensor_parallel_size={_size_of(config.target_parallel_config)}; leave it out": (
            _size_of(config.draft_parallel_config) not in (None, _size_of(config.target_parallel_config))
        ),
        "prompt embeddings are not supported with speculative decoding: leave out enable_prompt_embeds": (
            vllm_config.model_config.enable_prompt_embeds
        ),
    }
    for message, is_asked in refusals.items():
        if is_asked:
            raise UnsupportedConfigError(message)
    try:
        read_speculation(vllm_config)
    except ValueError as error:
        raise UnsupportedConfigError(str(error)) from None


def _check_multimodal(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    config = model.multimodal_config
    refusals = {
        f"{model.architecture} is not supported yet: use a text-only model, or one of "
        f"{', '.join(MULTIMODAL_ARCHITECTURES)}": model.architecture not in MULTIMODAL_ARCHITECTURES,
        "adapters are not supported with multimodal models yet: leave out enable_lora": vllm_config.lora_config,
        "speculative decoding is not supported with multimodal models yet: leave out speculative_config": (
            vllm_config.speculative_config
        ),
        "prompt embeddings are not supported with multimodal models yet: leave out enable_prompt_embeds": (
            model.enable_prompt_embeds
        ),
        "tensor parallelism is not supported with multimodal models yet: use tensor_parallel_size=1": (
            vllm_config.parallel_config.tensor_parallel_size > 1
        ),
        "video_pruning_rate is not supported: leave it out": config and config.is_multimodal_pruning_enabled(),
    }
    for message, is_asked in refusals.items():
        if is_asked:
            raise UnsupportedConfigError(message)


def _plugins() -> list[str]:
    """Installed logits processors."""
    return [each.name for each in entry_points(group=LOGITSPROCS_GROUP)]


def _size_of(parallel_config: ParallelConfig | None) -> int | None:
    return None if parallel_config is None else parallel_config.tensor_parallel_size


def _has_recurrent_layers(model: ModelConfig) -> bool:
    """Told by the config where it lists its layers; else the layers' cache specs tell (caches/kinds.py)."""
    config = model.hf_text_config
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return model.is_attention_free or any(kind in ("mamba", "linear_attention", "conv") for kind in kinds)


def check_request(params: SamplingParams | PoolingParams, token_ids: list[int], vocab_size: int) -> None:
    """Raises ValueError, which the API server answers with status 400.

    Refused are pooling requests, and token ids that no embedding has (vLLM checks those only where it has a tokenizer).
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(f"Token id {bad} is out of vocabulary: use ids below {vocab_size}")
    if not isinstance(params, SamplingParams):
        raise ValueError("this runner generates text: pooling requests are not supported")
    for token in params.allowed_token_ids or ():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"allowed_token_ids contains {token}, which is out of vocabulary: use ids below {vocab_size}"
            )
