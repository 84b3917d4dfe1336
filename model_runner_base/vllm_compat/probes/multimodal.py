"""Names in vLLM's releases for grouping a step's items and for dummy items; the models that were tried with each."""

from collections.abc import Sequence
from typing import Any

from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY, utils

_IS_OF_FIRST = hasattr(utils, "group_mm_kwargs_by_modality")

group_by_modality: Any = getattr(utils, "group_mm_kwargs_by_modality" if _IS_OF_FIRST else "group_and_batch_mm_kwargs")

UNTRIED_LATER = (
    "Gemma3ForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "WhisperForConditionalGeneration",
)
"""Architectures that are refused on later releases; docs/vllm_versions.md says why."""
VIDEOS_UNTRIED = () if _IS_OF_FIRST else ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""Architectures whose videos were not compared with another implementation on this release, or have other tokens."""


def tried(architectures: Sequence[str]) -> Sequence[str]:
    """Filters ``architectures`` for those whose images were compared with another implementation on this release."""
    return [each for each in architectures if _IS_OF_FIRST or each not in UNTRIED_LATER]


def largest_items(budget: Any, model_config: ModelConfig) -> list[tuple[str, Any]]:
    """Modality and data of vLLM's dummy items: of the kind with most tokens, as many as one step may encode.

    ``budget`` is a ``MultiModalBudget``.
    """
    if hasattr(budget, "get_dummy_encoder_profile_inputs"):
        return list(budget.get_dummy_encoder_profile_inputs())
    modality = budget.get_modality_with_max_tokens()
    inputs: Any = MULTIMODAL_REGISTRY.get_dummy_mm_inputs(model_config, {modality: 1})
    return [(modality, inputs["mm_kwargs"][modality][0])] * budget.mm_max_items_per_batch[modality]
