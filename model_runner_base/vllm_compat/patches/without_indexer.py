"""Models of sparse attention (DSA), which vLLM makes as the models of dense attention that they extend, if they are
short.

An indexer leaves a token ``index_topk`` keys. Up to that many tokens these are all keys, so attention is dense, and
vLLM's classes without the indexer compute the same. With a longer ``max_model_len`` the indexer runs.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm.config import ModelConfig

from model_runner_base.vllm_compat.probes.models import is_deepseek_v4

_FIELD = "index_topk"
"""Field of a config by which vLLM's classes tell whether there is an indexer."""

WITH_BUFFERS = ("vllm.model_executor.models.deepseek_v2", "vllm.model_executor.models.deepseek_mtp")
"""Modules of models that make buffers for an indexer's choice."""
WITH_OWN_BUFFERS = {"HYV4ForCausalLM": "vllm.models.hy_v4.nvidia.model"}
"""More of them, which not every release has, by architecture."""


class _WithoutIndexer:
    """View of a config that has all fields but the indexer's."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name in (_FIELD, "_config"):
            raise AttributeError(name)
        return getattr(self._config, name)


def num_indexed_keys(model_config: ModelConfig) -> int | None:
    """Number of keys that a model's indexer leaves a token; None for a model without one, or whose indexers choose
    among compressed entries."""
    if is_deepseek_v4(model_config.architecture):
        return None
    return getattr(model_config.hf_text_config, _FIELD, None)


def hides_keys(model_config: ModelConfig) -> bool:
    """Whether a model has an indexer that hides keys from some token of the longest request."""
    count = num_indexed_keys(model_config)
    return count is not None and model_config.max_model_len > count


def is_dense(model_config: ModelConfig) -> bool:
    """Whether a model has an indexer that leaves each token all keys, so that it need not run."""
    return num_indexed_keys(model_config) is not None and not hides_keys(model_config)


class OnHost:
    """View of vLLM's platform as one whose device is the host, where models are made."""

    device_type = "cpu"

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


@contextmanager
def without_indexer(model_config: ModelConfig) -> Iterator[None]:
    """Has vLLM make a model inside the block without its indexer, if it has one that need not run.

    One that runs has a buffer of what it chose, which nothing reads here. vLLM would make it on the device, before that
    is ready.
    """
    config = model_config.hf_config
    with ExitStack() as stack:
        if is_dense(model_config):
            model_config.hf_config = _WithoutIndexer(config)  # type: ignore[assignment]
        elif hides_keys(model_config):
            own = WITH_OWN_BUFFERS.get(model_config.architecture)
            for name in (*WITH_BUFFERS, own) if own else WITH_BUFFERS:
                module: Any = import_module(name)
                stack.enter_context(patch.object(module, "current_platform", OnHost(module.current_platform)))
        try:
            yield
        finally:
            model_config.hf_config = config


def without_weights_of_indexer(
    model_config: ModelConfig, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Weights of a checkpoint but for those of indexers that a model was made without.

    The model says whether it was: vLLM may lower ``max_model_len`` to what fits once it is made.
    """
    has_indexer = any(name.endswith(".indexer") for name, _ in model.named_modules())
    if num_indexed_keys(model_config) is None or has_indexer:
        return weights
    return ((name, tensor) for name, tensor in weights if ".indexer." not in name)
