"""Parameters of xIELU, Apertus' activation, in the model's dtype.

vLLM makes them in bfloat16, also for a model in float32. So does transformers 4, while transformers 5 loads them in the
model's dtype, which is more exact.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import transformers
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import XIELU

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

ARCHITECTURE = "ApertusForCausalLM"


def use_models_dtype(vllm_config: VllmConfig) -> None:
    """Has vLLM make xIELU as the installed transformers does; does nothing for models other than Apertus."""
    is_apertus = vllm_config.model_config.architecture == ARCHITECTURE
    if is_apertus and int(transformers.__version__.partition(".")[0]) >= 5:
        wrap_once(XIELU, "__init__", _in_default_dtype)


def _in_default_dtype(make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def init(self: XIELU, *args: Any, **kwargs: Any) -> None:
        # torch's default dtype is the model's while vLLM makes a model.
        make(self, *args, **{"dtype": torch.get_default_dtype()} | kwargs)

    return init
