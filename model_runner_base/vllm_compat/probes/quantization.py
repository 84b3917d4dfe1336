"""Quantisation methods that a user registered with vLLM, in place of its own or in addition to them."""

import inspect
from typing import Any, get_args


def is_registered_by_user(quantization_config: dict[str, Any] | None, asked: str | None, hf_config: Any) -> bool:
    """Whether a user's own method reads a checkpoint; ``asked`` is the method that was asked for, if any."""
    from vllm.model_executor.layers import quantization as methods

    own = methods._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    method = (quantization_config or {}).get("quant_method")
    if asked in own or method in own:
        return True
    if asked is not None and asked not in get_args(methods.QuantizationMethods):
        return True
    return any(_overrides(each, quantization_config, asked, hf_config) for each in own.values())


def _overrides(method: Any, quantization_config: dict[str, Any] | None, asked: str | None, hf_config: Any) -> bool:
    """Whether a method takes a checkpoint of another method's; newer releases show it the model's config too."""
    if quantization_config is None:
        return False
    override = method.override_quantization_method
    further = {"hf_config": hf_config} if "hf_config" in inspect.signature(override).parameters else {}
    return override(quantization_config, asked, **further) is not None
