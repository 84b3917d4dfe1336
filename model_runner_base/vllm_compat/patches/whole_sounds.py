"""Sounds reach Qwen2-Audio whole.

vLLM 0.16 hands the limit of a prompt's tokens to transformers' processor, which takes it for a limit of a sound's
samples too. Its Whisper leaves the limit out where there are sounds; its Qwen2-Audio is made to do the same here.
"""

from functools import wraps
from typing import Any

OF_TEXT = ("truncation", "max_length")


def keep_sounds_whole(architecture: str) -> None:
    """Sounds of more than the feature extractor's own length are cut to it, as transformers does."""
    if architecture != "Qwen2AudioForConditionalGeneration":
        return
    from vllm.model_executor.models.qwen2_audio import Qwen2AudioMultiModalProcessor as Processor

    call = Processor._call_hf_processor
    if hasattr(call, "__wrapped__"):
        return

    @wraps(call)
    def call_hf_processor(self: Any, prompt: str, mm_data: Any, mm_kwargs: Any, tok_kwargs: Any) -> Any:
        kept = {name: value for name, value in tok_kwargs.items() if name not in OF_TEXT}
        return call(self, prompt, mm_data, mm_kwargs, kept)

    Processor._call_hf_processor = call_hf_processor  # type: ignore[method-assign]
