"""Choices of vLLM's configs that are made otherwise here: dtype, drafting method, backend, quantisation."""

import json
from collections.abc import Callable, Collection
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config import model as model_config
from vllm.logger import init_logger
from vllm.model_executor.models import config as models_config
from vllm.platforms import current_platform

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

logger = init_logger(f"vllm.{__name__}")


def take_dtypes_in_order() -> None:
    """Has vLLM treat pooling models as all others, and say in one line why a checkpoint's dtype is not taken.

    By itself vLLM runs a pooling model of float32 in float16, and warns that a device does not support a dtype that
    ``supported_dtypes`` leaves out.

    ``dtype="auto"`` then means the checkpoint's dtype, or the device's first one.
    """
    wrap_once(model_config, "_resolve_auto_dtype", _in_order)


def _in_order(resolve: Callable[..., torch.dtype]) -> Callable[..., torch.dtype]:
    @wraps(resolve)
    def _resolve_auto_dtype(model_type: str, config_dtype: torch.dtype, *, is_pooling_model: bool) -> torch.dtype:
        is_left_out = config_dtype not in current_platform.supported_dtypes
        if not is_left_out or config_dtype not in getattr(current_platform, "dtypes", ()):
            return resolve(model_type, config_dtype, is_pooling_model=False)
        chosen = resolve(model_type, torch.float32, is_pooling_model=False)
        said, taken = (str(dtype).removeprefix("torch.") for dtype in (config_dtype, chosen))
        logger.info_once(
            "The checkpoint says %s, which %s emulates, many times slower than %s: the model runs in %s. To run it in "
            "%s, give --dtype %s",
            *(said, current_platform.get_device_name(), taken, taken, said, said),
        )
        return chosen

    return _resolve_auto_dtype


def marked_method(model: Any) -> str | None:
    """Method of a local checkpoint that has the mark; None for any other."""
    file = Path(str(model)) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    if not config.get("is_eagle"):
        return None
    return "eagle3" if "eagle3" in "".join(config.get("architectures", ())).lower() else "eagle"


def recognise_marked_heads(engine_args_cls: Any) -> None:
    """Makes vLLM's ``EngineArgs`` fill in ``method`` if ``speculative_config`` names a marked head but no method.

    A marked head has ``"is_eagle": true`` in its ``config.json``.

    Some toolchains mark the heads that they write in this way. vLLM itself goes by the checkpoint's name.
    """
    create = engine_args_cls.create_speculative_config
    if hasattr(create, "__wrapped__"):
        return

    @wraps(create)
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.speculative_config
        if isinstance(config, dict) and not config.get("method") and (method := marked_method(config.get("model"))):
            self.speculative_config = {**config, "method": method}
        return create(self, *args, **kwargs)

    engine_args_cls.create_speculative_config = create_speculative_config


def leave_backend_open() -> None:
    """Has the configurations of Gemma 4, whose layers have two head sizes, leave the backend to the platform.

    vLLM chooses backends for these models, because its own kernels need those; plain torch does not. A backend that the
    user chose stays.
    """
    for name in ("Gemma4Config", "EmbeddingGemma2ModelConfig"):
        config = getattr(models_config, name, None)
        if config is not None:
            wrap_once(config, "verify_and_update_config", _without_choice)


def _without_choice(verify: Callable[[Any], None]) -> Any:
    def verify_and_update_config(vllm_config: Any) -> None:
        chosen = vllm_config.attention_config.backend
        verify(vllm_config)
        vllm_config.attention_config.backend = chosen

    return staticmethod(verify_and_update_config)


def before_a_method_is_chosen(action: Callable[[ModelConfig, Collection[str]], None]) -> None:
    """Calls ``action`` for each config of a model, a draft's too, with the methods that the platform has kernels for.

    It is called after the config has read that of the checkpoint, and before the method is looked up.
    """

    def wrapper(verify: Any) -> Any:
        @wraps(verify)
        def verify_quantization(self: Any) -> None:
            action(self, current_platform.supported_quantization)
            verify(self)

        return verify_quantization

    wrap_once(ModelConfig, "_verify_quantization", wrapper)
