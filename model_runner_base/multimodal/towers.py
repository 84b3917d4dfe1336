"""A multimodal model's towers: the encoders, and the projectors behind them, which no step's graph runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def towers_left_out(model: nn.Module) -> Iterator[None]:
    """Within it the model has no towers: what moves or re-lays its weights leaves theirs where and as they are.

    vLLM's models say which of their modules these are (``SupportsMultiModal._mark_tower_model``).
    """
    paths = [path.rpartition(".") for path in getattr(model, "_tower_model_names", ())]
    towers = [(model.get_submodule(parent), name) for parent, _, name in paths]
    modules = [getattr(parent, name) for parent, name in towers]
    for parent, name in towers:
        setattr(parent, name, None)
    try:
        yield
    finally:
        for (parent, name), module in zip(towers, modules, strict=True):
            setattr(parent, name, module)
