"""Limits of multimodal models: what is refused before the engine is up."""

from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger

from model_runner_base.errors import refuse
from model_runner_base.vllm_compat.probes import multimodal
from model_runner_base.vllm_compat.probes.config import setting
from model_runner_base.vllm_compat.probes.multimodal_class import (
    SEES_WHOLE_PROMPT,
    WINDOW_AND_PROMPT,
    has_window_and_prompt,
    untested_need,
)
from model_runner_base.vllm_compat.types.recurrent import WITH_DRAFTING_LAYERS
from model_runner_base.vllm_compat.types.speculation import HOST_METHODS

METHODS_WITH_IMAGES = (*HOST_METHODS, "eagle", "eagle3", "medusa")
"""Speculative methods that are supported with images. Draft heads know an image through the target's hidden states; a
draft model would need the image itself, and ``mtp`` is not tested."""
MULTIMODAL_ARCHITECTURES = (
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
)
"""Multimodal architectures that are tested against another implementation. Others are served with a warning, if what
they need of a runner is tested with one of these."""
ALONE_ON_A_RANK = (
    "Qwen2AudioForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "WhisperForConditionalGeneration",
)
"""Architectures whose towers were not compared over several ranks of tensor parallelism."""
TEXT_ALONE = "limit_mm_per_prompt={'image': 0, 'video': 0, 'audio': 0}"
"""Setting with which a multimodal model is one of text."""

logger = init_logger(__name__)


def check_text_alone(model: ModelConfig) -> None:
    """Raises UnsupportedConfigError for a multimodal model whose text alone is not served."""
    name = model.architecture
    refuse(
        {
            f"{name} is not supported yet: tokens of its prompts see those after them, also without an image": (
                name in SEES_WHOLE_PROMPT
            ),
            f"{name} is not supported yet, since {WINDOW_AND_PROMPT}: use another model": has_window_and_prompt(model),
            "prompt embeddings are not supported with text of multimodal models yet: leave out enable_prompt_embeds": (
                model.enable_prompt_embeds
            ),
        }
    )
    if name not in multimodal.tried(MULTIMODAL_ARCHITECTURES):
        logger.warning("The text of %s was not compared with another implementation.", name)


def check_multimodal(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for what multimodal models are not served with, and warns of untried families."""
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    config = model.multimodal_config
    served = multimodal.tried(MULTIMODAL_ARCHITECTURES)
    has_alone = model.architecture not in (*SEES_WHOLE_PROMPT, *multimodal.OTHER_ITEMS) and not model.is_encoder_decoder
    alone = f"its text alone ({TEXT_ALONE})" if has_alone else "a text-only model"
    is_tried = model.architecture in served
    need = None if is_tried else untested_need(model)
    ranked = [each for each in served if each not in ALONE_ON_A_RANK]
    ranks = vllm_config.parallel_config.tensor_parallel_size
    methods = (*METHODS_WITH_IMAGES, *["mtp"] * (model.architecture in WITH_DRAFTING_LAYERS))
    refusals = {
        f"{model.architecture} is not supported yet, since {need}: use {alone}, or one of {', '.join(served)}": need,
        "embeddings in place of images, videos and sounds are supported with families that were tried alone: leave out "
        f"enable_mm_embeds, or use one of {', '.join(served)}": not is_tried and config and config.enable_mm_embeds,
        "towers of families that were not tried are tried when the engine starts: leave out skip_mm_profiling": (
            not is_tried and config and config.skip_mm_profiling
        ),
        f"videos are not supported with {model.architecture} yet: set limit_mm_per_prompt to {{'video': 0}}": (
            model.architecture in multimodal.WITHOUT_VIDEO and config and config.get_limit_per_prompt("video") > 0
        ),
        "adapters of a tower or a connector are not supported yet: leave out enable_tower_connector_lora": (
            vllm_config.lora_config and vllm_config.lora_config.enable_tower_connector_lora
        ),
        f"drafts by {drafts and drafts.method} are not supported with multimodal models yet: use one of "
        f"{', '.join(methods)}, or leave out speculative_config": drafts and drafts.method not in methods,
        "prompt embeddings are not supported with multimodal models yet: leave out enable_prompt_embeds": (
            model.enable_prompt_embeds
        ),
        f"{model.architecture} was not tried over ranks with its tower: use tensor_parallel_size=1, {alone}, or one of "
        f"{', '.join(ranked)}": ranks > 1 and model.architecture not in ranked,
        "vectors of images were not tried over ranks: use tensor_parallel_size=1": ranks > 1
        and model.runner_type == "pooling",
        "whole images are not shared out among ranks yet: leave out mm_encoder_tp_mode, and towers are cut like other "
        "layers": ranks > 1 and setting(config, "mm_encoder_tp_mode") == "data",
        "with priorities this scheduler may skip the encoding of an image: leave out scheduler_cls, or "
        "scheduling_policy; where VLLM_PLUGINS is set, add model_runner_base to it": vllm_config.scheduler_config.policy
        == "priority"
        and not getattr(vllm_config.scheduler_config.get_scheduler_cls(), "forgets_preempted_steps", False),
        "towers are compiled by the device or run eagerly: leave out compile_mm_encoder": (
            setting(vllm_config.compilation_config, "compile_mm_encoder", False)
        ),
        "video_pruning_rate is not supported: leave it out": config and config.is_multimodal_pruning_enabled(),
        "tokens of an image see each other in this model, so a chunk must hold a whole image: leave out "
        "long_prefill_token_threshold": model.is_mm_prefix_lm
        and vllm_config.scheduler_config.long_prefill_token_threshold,
        "an image is longer than this model's window, and the keys of its first tokens may be freed when a cached "
        "prefix ends inside it: set enable_prefix_caching=False": vllm_config.cache_config.enable_prefix_caching
        and _has_images_longer_than_window(model),
        "an image is longer than this model's window, and transformers of this release hides its first tokens from its "
        "last: use vLLM 0.16": not multimodal.SEES_BEFORE_WINDOW and _has_images_longer_than_window(model),
    }
    refuse(refusals)
    if not is_tried:
        logger.warning_once(
            "Images, videos and sounds of %s were not compared with another implementation.", model.architecture
        )


def _has_images_longer_than_window(model: ModelConfig) -> bool:
    """Whether a window is shorter than a run of tokens that see each other."""
    window = getattr(model.hf_text_config, "sliding_window", None)
    return bool(model.is_mm_prefix_lm and window and window < getattr(model.hf_config, "mm_tokens_per_image", 0))
