"""Limits of pooling models: what is refused before the engine is up."""

from typing import Any

from vllm.config import VllmConfig

from model_runner_base.errors import refuse
from model_runner_base.vllm_compat.types.recurrent import has_states

ENCODER_ONLY_ARCHITECTURES = (
    "BertModel",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertSpladeSparseEmbeddingModel",
    "HF_ColBERT",
    "BgeM3EmbeddingModel",
    "RobertaModel",
    "RobertaForSequenceClassification",
    "XLMRobertaModel",
    "XLMRobertaForSequenceClassification",
    "ModernBertModel",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
    "LlamaModel",
    "LlamaBidirectionalModel",
    "LlamaBidirectionalForSequenceClassification",
    "Qwen2Model",
    "Qwen2ForCausalLM",
    "Qwen3Model",
    "Qwen3ForCausalLM",
    "Gemma3TextModel",
)
"""Architectures whose tokens see all of their text, of classes that are held against another implementation."""
UNTESTED_POOLERS = ("GritLM", "JinaVL", "JinaForRanking", "Terratorch", "Prithvi", "ColBERT")
"""Beginnings of names of architectures with poolers of their own that are not tested."""
MULTIMODAL_ARCHITECTURES = ("Qwen3VLForConditionalGeneration",)
"""Architectures whose vectors of images and text are held against another implementation."""


def check_pooling(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for the first setting that pooling models are not served with."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    pooler: Any = model.pooler_config
    is_encoder = model.attn_type == "encoder_only"
    is_shared = vllm_config.parallel_config.tensor_parallel_size > 1
    refusals = {
        f"{model.architecture} is not supported as a pooling model yet: use one without a pooler of its own": (
            model.architecture.startswith(UNTESTED_POOLERS)
        ),
        f"{model.architecture}, whose tokens see all of their text, is not supported yet: use a decoder, or one of "
        f"{', '.join(ENCODER_ONLY_ARCHITECTURES)}": (
            is_encoder and model.architecture not in ENCODER_ONLY_ARCHITECTURES
        ),
        f"{model.architecture} keeps no KV cache: leave out kv_cache_dtype": (
            is_encoder and vllm_config.cache_config.cache_dtype != "auto"
        ),
        f"{model.architecture} pools no images yet: use a model of text, or vectors of "
        f"{', '.join(MULTIMODAL_ARCHITECTURES)}": (
            model.is_multimodal_model and model.architecture not in MULTIMODAL_ARCHITECTURES
        ),
        f"{model.architecture} gives no classes and scores of images yet: leave out convert, and it gives vectors": (
            model.is_multimodal_model and model.convert_type == "classify"
        ),
        "pooling models with recurrent layers are not supported yet: use a model of attention layers": (
            has_states(vllm_config)
        ),
        f"adapters of {model.architecture}, whose tokens see all of their text, are not supported yet: leave out "
        "enable_lora": is_encoder and vllm_config.lora_config,
        f"adapters of {model.architecture} are not supported for vectors of images yet: leave out enable_lora": (
            model.is_multimodal_model and vllm_config.lora_config
        ),
        "speculative decoding makes no sense for pooling models: leave out speculative_config": (
            vllm_config.speculative_config
        ),
        "prompt embeddings are not supported with pooling models yet: leave out enable_prompt_embeds": (
            model.enable_prompt_embeds
        ),
        f"{model.architecture}, whose tokens see all of their text, is not cut over ranks yet: use "
        "tensor_parallel_size=1": is_shared and is_encoder,
        f"the classifier of {model.architecture} is made of tokens of the vocabulary, of which each rank has a part: "
        "use tensor_parallel_size=1": is_shared and getattr(model.hf_text_config, "classifier_from_token", None),
        "adapters of pooling models are not cut over ranks yet: leave out enable_lora, or use tensor_parallel_size=1": (
            is_shared and vllm_config.lora_config
        ),
        f"prompts of {model.architecture} cannot be cut, since its pooler needs each whole: leave out "
        "enable_chunked_prefill": scheduler.enable_chunked_prefill and not model.is_chunked_prefill_supported,
        f"prefixes of {model.architecture} cannot be cached, since its pooler needs each prompt whole: leave out "
        "enable_prefix_caching": (
            vllm_config.cache_config.enable_prefix_caching and not model.is_prefix_caching_supported
        ),
        "long texts are not cut and averaged yet: leave enable_chunked_processing out of pooler_config": (
            getattr(pooler, "enable_chunked_processing", None)
        ),
    }
    refuse(refusals)
