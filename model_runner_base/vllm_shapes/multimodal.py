"""What vLLM's releases call the grouping of a step's images and videos, and which models it was tried with."""

from collections.abc import Sequence
from typing import Any

from vllm.multimodal import utils

_IS_OF_FIRST = hasattr(utils, "group_mm_kwargs_by_modality")

group_by_modality: Any = getattr(utils, "group_mm_kwargs_by_modality" if _IS_OF_FIRST else "group_and_batch_mm_kwargs")

TRIED_LATER = ("LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration")


def tried(architectures: Sequence[str]) -> Sequence[str]:
    """Those of the architectures whose images were held against another implementation on such a release."""
    return architectures if _IS_OF_FIRST else TRIED_LATER
