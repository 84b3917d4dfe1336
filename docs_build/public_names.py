"""Names that docs/public_api.md promises, found in the code, with the signatures of the stable ones."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "public_api.md"
ROW = re.compile(r"^\| (`[^|]+) \| (\w+) \|", re.MULTILINE)
"""Row of a table of names: its names, and how stable they are."""


@dataclass(frozen=True)
class PublicName:
    """A class or function of the base, or an attribute of a class."""

    name: str
    is_stable: bool
    value: Any

    @property
    def signature(self) -> str | None:
        """Parameters with their defaults, without types; None of what is not called."""
        call = inspect.unwrap(self.value) if callable(self.value) else None
        if call is None or isinstance(call, type):
            return None
        found = inspect.signature(call)
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
        return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def public_names() -> Iterator[PublicName]:
    """Names of the page's tables "Override" and "Call". ``Class.a`` and then ``b`` are two names of one class.

    Raises:
        AttributeError: a name does not exist.
    """
    text = PAGE.read_text().partition("## Attributes")[0]
    for cells, level in ROW.findall(text):
        owner = ""
        for name in re.findall(r"`([\w.]+\*?)`", cells):
            first = name.rpartition(".")[0]
            if first in homes() or name in homes():
                owner = first if first in homes() else name
            elif not first and owner:
                name = f"{owner}.{name}"
            for each in _expanded(name):
                yield PublicName(each, level == "stable", find(each))


def _expanded(name: str) -> list[str]:
    """The names that a name with a star at its end stands for."""
    if not name.endswith("*"):
        return [name]
    owner, _, beginning = name[:-1].rpartition(".")
    return [f"{owner}.{each}" for each in dir(find(owner)) if each.startswith(beginning)]


def find(name: str) -> Any:
    """The value of a name: a class, an attribute of a class, or what a module has. None of attributes of instances."""
    first, _, attribute = name.rpartition(".")
    if name in homes():
        return getattr(import_module(homes()[name]), name)
    if first in homes():
        cls = find(first)
        annotated = {key for each in cls.__mro__ for key in vars(each).get("__annotations__", ())}
        return getattr(cls, attribute, None) if attribute in annotated else getattr(cls, attribute)
    if first:
        return getattr(import_module(f"model_runner_base.{first}"), attribute)
    return getattr(import_module("model_runner_base"), name)


@cache
def homes() -> dict[str, str]:
    """Module of each class of the base by the class's name."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "model_runner_base").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if ".testing" not in module and ".vllm_compat" not in module:
            classes = (node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
            found |= {name: module for name in classes if not name.startswith("_")}
    return found


def signatures() -> dict[str, str]:
    """Signatures of the stable functions and methods by name; of a stable class, those of all its public methods."""
    found = []
    for each in public_names():
        if each.is_stable:
            found += [each, *_methods(each)]
    return {each.name: each.signature for each in found if each.signature is not None}


def _methods(name: PublicName) -> Iterator[PublicName]:
    """Public methods that a class itself defines."""
    if isinstance(name.value, type):
        for key in vars(name.value):
            value = getattr(name.value, key)
            if inspect.isroutine(value) and not key.startswith("_"):
                yield PublicName(f"{name.name}.{key}", name.is_stable, value)
