"""Gives Qwen2-Audio whole sounds.

vLLM 0.16 passes the limit of a prompt's tokens to transformers' processor, which also applies it to a sound's samples.
vLLM's class for Whisper leaves the limit out if there are sounds. Here its class for Qwen2-Audio does the same.
"""

from functools import wraps
from typing import Any

OF_TEXT = ("truncation", "max_length")


def keep_sounds_whole(architecture: str) -> None:
    """Patches the model's processor. Sounds are still cut to the feature extractor's length, as transformers does."""
    if architecture != "Qwen2AudioForConditionalGeneration":
        return
    from vllm.model_executor.models.qwen2_audio import Qwen2AudioMultiModalProcessor as Processor

    call: Any = vars(Processor).get("_call_hf_processor")
    if call is None or hasattr(call, "__wrapped__"):  # Later releases pass no limit of tokens.
        return

    @wraps(call)
    def call_hf_processor(self: Any, prompt: str, mm_data: Any, mm_kwargs: Any, tok_kwargs: Any) -> Any:
        kept = {name: value for name, value in tok_kwargs.items() if name not in OF_TEXT}
        return call(self, prompt, mm_data, mm_kwargs, kept)

    Processor._call_hf_processor = call_hf_processor  # type: ignore[method-assign]
