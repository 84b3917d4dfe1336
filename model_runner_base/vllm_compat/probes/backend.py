"""Models that vLLM serves by transformers' own classes (its Transformers backend)."""

from typing import Any

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Types of layers that the backend tells apart; it has all others see every key."""


def uses_backend(model_config: Any) -> bool:
    # A model within another one, such as the text model of Idefics 3, may have no architecture of its own.
    return bool(model_config.architectures and model_config.using_transformers_backend())


def other_layer_type(model_config: Any) -> str | None:
    """The first type of layer that the backend would take for full attention; None if there is none."""
    types = getattr(model_config.hf_text_config, "layer_types", None) or ()
    other = next((name for name in types if name not in LAYER_TYPES), None)
    return other if other is not None and uses_backend(model_config) else None
