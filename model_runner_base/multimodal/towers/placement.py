"""Finding the towers of a multimodal model, which no graph of a step runs, and where they are placed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn


@contextmanager
def towers_left_out(model: nn.Module) -> Iterator[None]:
    """Within it the model has no towers: what moves or re-lays its weights leaves theirs where and as they are.

    vLLM's models say which of their modules these are (``SupportsMultiModal._mark_tower_model``). A parameter of the
    model's own, such as the embedding between the rows of an image, goes with them: the text has modules alone.
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
    """A model's towers; none of a model of text alone."""
    seeing: Any = model
    names = seeing._tower_model_names if getattr(model, "supports_multimodal", False) else []
    return [model.get_submodule(name) for name in names]


def copied(module: nn.Module) -> nn.Module:
    """Another of the same weights; vLLM's own parameters cannot be copied."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in module.parameters()}
    return deepcopy(module, memo)
