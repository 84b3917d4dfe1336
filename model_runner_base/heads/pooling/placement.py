"""Modules that only a model's pooler runs: they stay on the host, and keep the activations of the checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.bert import BertPooler
from vllm.model_executor.models.modernbert import ModernBertPooler

from model_runner_base.errors import UnsupportedConfigError


def pooler_modules(model: nn.Module) -> list[nn.Module]:
    """Modules with weights that a pooling model's pooler reaches; none for a model without a pooler.

    vLLM's poolers hold some of them in dictionaries and in the closures of functions, so that no name in the checkpoint
    changes. Raises UnsupportedConfigError for a pooler that reaches the model's attention.
    """
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    left: list[Any] = [getattr(model, "pooler", None)]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            if any(isinstance(module, AttentionLayerBase) for module in each.modules()):
                raise UnsupportedConfigError(f"the pooler of {type(model).__name__} runs layers of the model itself")
            if each._parameters:
                found[id(each)] = each
            left += [*each._modules.values(), *vars(each).values()]
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
        elif isinstance(each, MethodType):
            left.append(each.__self__)
        elif isinstance(each, FunctionType):
            left += [cell.cell_contents for cell in each.__closure__ or ()]
    return list(found.values())


def pooler_to_host(model: nn.Module) -> None:
    """Moves the pooler's modules to the host; those that are there stay as they are."""
    for module in pooler_modules(model):
        module.to("cpu")


@contextmanager
def pooler_left_out(model: nn.Module) -> Iterator[None]:
    """Context in which the model lacks the pooler's modules, so that their weights are neither moved nor re-laid."""
    own = {id(module) for module in pooler_modules(model)}
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if id(child) in own
    ]
    for parent, name, _ in places:
        parent._modules[name] = None
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def keep_inner_activations(model: nn.Module) -> None:
    """Makes the activation of BERT's and ModernBERT's pooler a part of its projection, which every request gets.

    In vLLM a request with ``use_activation=False`` loses this activation, too, so its logits are not those of the
    checkpoint.
    """
    for module in model.modules():
        head: Any = module.head if isinstance(module, BertPooler | ModernBertPooler) else None
        if head is not None and head.activation is not None:
            head.projector = _ActivatedProjection(head.projector, head.activation)
            head.activation = None


class _ActivatedProjection:
    """A projection, then its activation."""

    def __init__(self, project: Any, activate: Any) -> None:
        self._project = project
        self._activate = activate

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._activate(self._project(rows))
