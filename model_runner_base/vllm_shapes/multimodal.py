"""What vLLM's releases call the grouping of a step's images and videos, and which of them encoders were tried with."""

from typing import Any

from vllm.multimodal import utils

IS_TRIED = hasattr(utils, "group_mm_kwargs_by_modality")
"""Later releases leave out what a request that resumes has encoded before."""

group_by_modality: Any = getattr(utils, "group_mm_kwargs_by_modality" if IS_TRIED else "group_and_batch_mm_kwargs")
