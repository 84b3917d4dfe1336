"""Choice of a model's head: generation, or pooling."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.tasks import SupportedTask

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.generate import supported_generation_tasks
from model_runner_base.heads.head import Head
from model_runner_base.heads.pooling.head import PoolingHead
from model_runner_base.heads.pooling.placement import keep_inner_activations, pooler_to_host
from model_runner_base.heads.pooling.pooler import supported_pooling_tasks
from model_runner_base.step.request_states import RequestStates


def pools(model_config: ModelConfig) -> bool:
    """Whether the engine asks for vectors of prompts, not for text."""
    return model_config.runner_type == "pooling"


def make_head(
    config: ModelConfig,
    model: Any,
    requests: RequestStates,
    device_ops: DeviceOps,
    make_generate_head: Callable[[], Head],
) -> Head:
    """Makes the head of a loaded ``model``; ``make_generate_head`` makes that of a model which generates text."""
    if not pools(config):
        return make_generate_head()
    assert isinstance(config.dtype, torch.dtype)
    pooler_to_host(model)
    keep_inner_activations(model)
    return PoolingHead(model, config.dtype, requests, device_ops)


def supported_tasks(model: Any, model_config: ModelConfig) -> tuple[SupportedTask, ...]:
    """Tasks that the API server offers."""
    if pools(model_config):
        return supported_pooling_tasks(model, getattr(model_config.hf_config, "num_labels", 0))
    return supported_generation_tasks(model)
