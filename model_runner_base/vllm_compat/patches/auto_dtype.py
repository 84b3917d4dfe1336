"""Meaning of ``dtype="auto"`` on a platform of this library: the checkpoint's dtype, or the device's first one."""

from collections.abc import Callable
from functools import wraps

import torch
from vllm.config import model as model_config
from vllm.logger import init_logger

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

logger = init_logger(f"vllm.{__name__}")


def take_dtypes_in_order() -> None:
    """Has vLLM treat pooling models as all others, and say in one line why a checkpoint's dtype is not taken.

    By itself vLLM runs a pooling model of float32 in float16, and warns that a device does not support a dtype that
    ``supported_dtypes`` leaves out.
    """
    wrap_once(model_config, "_resolve_auto_dtype", _in_order)


def _in_order(resolve: Callable[..., torch.dtype]) -> Callable[..., torch.dtype]:
    @wraps(resolve)
    def _resolve_auto_dtype(model_type: str, config_dtype: torch.dtype, *, is_pooling_model: bool) -> torch.dtype:
        from vllm.platforms import current_platform

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
