"""Finds the towers of a multimodal model, which no graph of a step runs, and keeps them where they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn


@contextmanager
def towers_left_out(model: nn.Module) -> Iterator[None]:
    """Context in which the model has no towers, so that their weights are neither moved nor re-laid.

    vLLM's models name their towers (``SupportsMultiModal._mark_tower_model``). A parameter of the model itself, such as
    the embedding between the rows of an image, is left out with them, because the text model consists of modules only.
    """
    seeing: Any = model
    is_seeing = getattr(model, "supports_multimodal", False)
    paths = [path.rpartition(".") for path in seeing._tower_model_names] if is_seeing else []
    towers = [(model.get_submodule(parent), name) for parent, _, name in paths]
    modules = [getattr(parent, name) for parent, name in towers]
    own = dict(model._parameters) if is_seeing else {}
    for parent, name in towers:
        setattr(parent, name, None)
    for name in own:
        model._parameters[name] = None
    try:
        yield
    finally:
        for (parent, name), module in zip(towers, modules, strict=True):
            setattr(parent, name, module)
        model._parameters.update(own)


def towers_of(model: nn.Module) -> Sequence[nn.Module]:
    """A model's towers; a text-only model has none."""
    seeing: Any = model
    names = seeing._tower_model_names if getattr(model, "supports_multimodal", False) else []
    return [model.get_submodule(name) for name in names]


def copied(module: nn.Module) -> nn.Module:
    """Copies a module with its weights, including vLLM's parameters, which ``deepcopy`` alone cannot copy."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in module.parameters()}
    return deepcopy(module, memo)
