"""Refuses GGUF files by name, before vLLM looks for a model's config in them."""

from functools import wraps
from typing import Any

from vllm.engine import arg_utils
from vllm.platforms import current_platform

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_compat.patches.wrap_once import wrap_once


def refuse_gguf_files() -> None:
    """Has vLLM raise UnsupportedConfigError for a GGUF file, unless the platform has kernels for such files.

    Newer releases of vLLM do not know these files, and would say that they find no model. Older ones would first
    download and read one.
    """
    module: Any = arg_utils
    wrap_once(module, "maybe_override_with_speculators", _but_for_gguf)  # The first to look at the model.


def _but_for_gguf(look_at: Any) -> Any:
    @wraps(look_at)
    def maybe_override_with_speculators(model: Any, *args: Any, **kwargs: Any) -> Any:
        if str(model).endswith(".gguf") and "gguf" not in current_platform.supported_quantization:
            raise UnsupportedConfigError(
                f"GGUF files are not dequantised yet: instead of {model} use the checkpoint that it was made from"
            )
        return look_at(model, *args, **kwargs)

    return maybe_override_with_speculators
