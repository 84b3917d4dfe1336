"""Names in vLLM's releases for grouping a step's items and for dummy items; the models that were tried with each."""

from collections.abc import Sequence
from typing import Any

from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY, utils

from model_runner_base.vllm_compat.probes.config import setting

_IS_OF_FIRST = hasattr(utils, "group_mm_kwargs_by_modality")

group_by_modality: Any = getattr(utils, "group_mm_kwargs_by_modality" if _IS_OF_FIRST else "group_and_batch_mm_kwargs")

BY_TRANSFORMERS: tuple[str, ...] = () if _IS_OF_FIRST else ("HunYuanVLForConditionalGeneration",)
"""Architectures that were tried with vLLM's Transformers backend, which takes embeddings of one item at a time."""
SEES_BEFORE_WINDOW = _IS_OF_FIRST
"""Whether transformers lets a token of an image see the image's tokens before its window, as this library does."""
LATER_ALONE = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
)
"""Architectures that the first of the releases does not have, or that were not compared with it."""
NEEDS_TIMES: tuple[str, ...] = () if _IS_OF_FIRST else ("Qwen2_5_VLForConditionalGeneration",)
"""Architectures whose videos must come with the time of each frame, although their prompts do not name it."""
_GLM = ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "GlmOcrForConditionalGeneration")
WITHOUT_VIDEO: tuple[str, ...] = _GLM if _IS_OF_FIRST else ()
"""Architectures whose videos are refused, since the first of vLLM's releases counts the frames of a video in M-RoPE,
but not the text between them."""

MODALITIES = ("image", "video", "audio")
OTHER_ITEMS = ("KimiK25ForConditionalGeneration",)
"""Architectures whose items are of a further kind, which ``limit_mm_per_prompt`` names otherwise."""


def takes_items(model_config: ModelConfig) -> bool:
    """Whether requests may have images, videos or sounds.

    If ``limit_mm_per_prompt`` rules them out, vLLM loads no towers, and the model is one of text. The positions of
    XD-RoPE come from the encoder, also for text.
    """
    config = model_config.multimodal_config
    if not model_config.is_multimodal_model or config is None:
        return model_config.is_multimodal_model
    is_open = any(config.get_limit_per_prompt(modality) > 0 for modality in MODALITIES)
    is_open |= config.enable_mm_embeds or model_config.architecture in OTHER_ITEMS
    return model_config.is_encoder_decoder or is_open or setting(model_config, "uses_xdrope_dim", 0) > 0


def sees_in_windows(model: Any) -> bool:
    """Whether tokens of an image see each other in layers with a window alone, and no key before it.

    Gemma 4 says so to vLLM's own runner by this attribute.
    """
    return getattr(model, "mm_prefix_clamp_sliding_window", False)


def decoder_of(processed_inputs: Any) -> Any:
    """Inputs of the decoder, if those of a request are for an encoder and a decoder; else all of them."""
    for name in ("decoder", "decoder_prompt"):
        if name in processed_inputs:
            return processed_inputs[name]
    return processed_inputs


def tried(architectures: Sequence[str]) -> Sequence[str]:
    """Filters ``architectures`` for those whose images were compared with another implementation on this release."""
    return [each for each in architectures if not _IS_OF_FIRST or each not in LATER_ALONE]


def largest_items(budget: Any, model_config: ModelConfig) -> list[tuple[str, Any]]:
    """Modality and data of vLLM's dummy items: of the kind with most tokens, as many as one step may encode.

    ``budget`` is a ``MultiModalBudget``.
    """
    if hasattr(budget, "get_dummy_encoder_profile_inputs"):
        return list(budget.get_dummy_encoder_profile_inputs())
    modality = budget.get_modality_with_max_tokens()
    inputs: Any = MULTIMODAL_REGISTRY.get_dummy_mm_inputs(model_config, {modality: 1})
    return [(modality, inputs["mm_kwargs"][modality][0])] * budget.mm_max_items_per_batch[modality]
