"""Targets of compressed-tensors: names of layers, patterns of names, and classes of modules."""

import re
from collections.abc import Iterable

_RENAMED = {"model", "language_model"}
"""Parts of a layer's name that releases of transformers add, leave out and change in order, while a config keeps the
names that its layers had."""
_EMBEDDINGS = {"wte", "wpe"}
"""Names of embeddings without "embed" in them."""
_HEADS = {"embed_out"}
"""Names of heads with "embed" in them."""


class Targets:
    """Targets of all groups, or those that are ignored. One with ``re:`` is a pattern that a name begins with."""

    def __init__(self, targets: Iterable[str]) -> None:
        ordered = sorted(targets)
        self._names = {_own_parts(target): target for target in ordered if not target.startswith("re:")}
        self._patterns = {each: re.compile(each.removeprefix("re:")) for each in ordered if each.startswith("re:")}

    def by_name(self, layer: str) -> str | None:
        """The target that is a layer's name, else the first pattern in alphabetical order that the name fits.

        This is the order of the library that writes such files. It does not depend on the order of the groups.
        """
        patterns = (target for target, pattern in self._patterns.items() if pattern.match(layer))
        return self._names.get(_own_parts(layer)) or next(patterns, None)

    def by_class(self, layer: str) -> str | None:
        """The target that is the class of a layer's module."""
        return next((self._names[each] for each in _classes(layer) if each in self._names), None)


def _own_parts(layer: str) -> str:
    return ".".join(part for part in layer.split(".") if part not in _RENAMED)


def _classes(layer: str) -> tuple[str, ...]:
    """Classes of a layer's module in transformers or vLLM, told by the layer's name."""
    own = layer.rpartition(".")[2]
    if own in _EMBEDDINGS or ("embed" in own and "proj" not in own and own not in _HEADS):
        return ("Embedding",)
    # vLLM's classes of experts, which take the settings of Linear where no group has theirs.
    return ("RoutedExperts", "FusedMoE", "Linear") if ".experts." in layer else ("Linear",)
