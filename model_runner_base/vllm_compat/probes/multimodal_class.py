"""Needs of a multimodal model of a runner, as vLLM's config and its class of the model say.

A model's towers run as they are, and so do the positions that its class computes. What a runner must know of is how
outputs of the towers get into the model, and which tokens see each other.
"""

from typing import Any

from model_runner_base.vllm_compat.probes.config import setting
from model_runner_base.vllm_compat.probes.multimodal import OTHER_ITEMS

EMBEDS = "embed_input_ids"
EMBEDS_AS_TESTED = (
    "SupportsMultiModal",
    "InternS1ForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)
"""vLLM's classes whose ``embed_input_ids`` puts the outputs of a tower in place of the placeholders' embeddings, and
keeps at most levels of deepstack."""
TRANSFORMERS_BACKEND = "vllm.model_executor.models.transformers"
SEES_WHOLE_PROMPT = ("PaliGemmaForConditionalGeneration",)
"""Architectures whose text sees all of the prompt, which nothing here computes."""
SEES_ITSELF = ("BagelForConditionalGeneration", "Moondream3ForCausalLM")
"""Architectures in which tokens of an image see each other although vLLM 0.16 does not say so."""
ENDS_BEFORE_NORM = ("AyaVisionForConditionalGeneration",)
"""Architectures whose tower ends before its last norm in transformers, and after it in the first of vLLM's releases.
Later ones run it by their Transformers backend."""


WINDOW_AND_PROMPT = "its outputs see the prompt and a window of themselves (R-SWA)"


def has_window_and_prompt(model_config: Any) -> bool:
    """Whether generated tokens see the prompt and a window, which newer releases have a cache spec for."""
    return bool(setting(model_config, "rswa_window", None))


def untested_need(model_config: Any) -> str | None:
    """Need of a model that no family that was tried has, as words after "since"; None if there is none."""
    name = model_config.architecture
    needs = {
        "tokens of its prompts see those after them": name in SEES_WHOLE_PROMPT,
        "tokens of an image see each other": model_config.is_mm_prefix_lm or name in SEES_ITSELF,
        WINDOW_AND_PROMPT: has_window_and_prompt(model_config),
        "its items are neither images, videos nor sounds": name in OTHER_ITEMS,
        "its rotary positions are those of XD-RoPE": setting(model_config, "uses_xdrope_dim", 0),
        "its tower ends before its last norm": name in ENDS_BEFORE_NORM,
    }
    return next((need for need, is_needed in needs.items() if is_needed), None) or _need_of_class(model_config)


def _need_of_class(model_config: Any) -> str | None:
    # Late, since a platform checks a config while vLLM is half loaded.
    from vllm.model_executor.model_loader.utils import get_model_cls

    try:
        model_class = get_model_cls(model_config)
    except Exception as error:  # A module may ask for a library or a device that is not here.
        return f"vLLM's class of it cannot be imported here ({error})"
    return need_of(model_class)


def need_of(model_class: type) -> str | None:
    """Need that the class of a model tells."""
    embeds = getattr(model_class, EMBEDS)
    needs = {
        "vLLM's Transformers backend runs it": any(
            each.__module__.startswith(TRANSFORMERS_BACKEND) for each in model_class.__mro__
        ),
        "it reads the ids of tokens, not only their embeddings": (
            getattr(model_class, "requires_raw_input_tokens", False)
            or getattr(model_class, "supports_multimodal_raw_input_only", False)
        ),
        "its sounds arrive while it runs": getattr(model_class, "supports_realtime", False),
        "it encodes a video at a time": hasattr(model_class, "requires_sequential_video_encoding"),
        f"{model_class.__name__} has an {EMBEDS} of its own, which may keep more than embeddings": (
            embeds.__qualname__.partition(".")[0] not in EMBEDS_AS_TESTED
        ),
    }
    return next((need for need, is_needed in needs.items() if is_needed), None)
