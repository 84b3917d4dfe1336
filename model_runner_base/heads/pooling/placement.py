"""Modules that only a model's pooler runs: they stay on the host."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

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
