"""Experts whose activation has no gate, which later releases of vLLM make for devices with its own kernels alone."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once


def allow_experts_without_gate() -> None:
    """Has vLLM make experts without a gate (Nemotron-H) on every device; plain torch computes them."""
    wrap_once(FusedMoEConfig, "__post_init__", _without_refusal)


def _without_refusal(finish: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(finish)
    def __post_init__(self: Any) -> None:
        try:
            finish(self)
        except NotImplementedError:  # Raised last, when all else of the configuration is set.
            if self.is_act_and_mul:
                raise

    return __post_init__
