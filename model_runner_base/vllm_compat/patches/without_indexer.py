"""Models of sparse attention (DSA), which vLLM makes as the models of dense attention that they extend.

An indexer leaves a token ``index_topk`` keys. Up to that many tokens these are all keys, so attention is dense, and
vLLM's classes without the indexer compute the same.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import ModelConfig

_FIELD = "index_topk"
"""Field of a config by which vLLM's classes tell whether there is an indexer."""


class _WithoutIndexer:
    """View of a config that has all fields but the indexer's."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name in (_FIELD, "_config"):
            raise AttributeError(name)
        return getattr(self._config, name)


def num_indexed_keys(model_config: ModelConfig) -> int | None:
    """Number of keys that a model's indexer leaves a token; None for a model without one."""
    return getattr(model_config.hf_text_config, _FIELD, None)


@contextmanager
def without_indexer(model_config: ModelConfig) -> Iterator[None]:
    """Has vLLM make a model inside the block without its indexer, if it has one."""
    config = model_config.hf_config
    if num_indexed_keys(model_config) is not None:
        model_config.hf_config = _WithoutIndexer(config)  # type: ignore[assignment]
    try:
        yield
    finally:
        model_config.hf_config = config


def without_weights_of_indexer(
    model_config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Weights of a checkpoint but for those of its indexer."""
    if num_indexed_keys(model_config) is None:
        return weights
    return ((name, tensor) for name, tensor in weights if ".indexer." not in name)
