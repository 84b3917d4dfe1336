"""A vendor's methods and imports, held against the installed vLLM and the base: what drifted shows before it runs."""

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

OURS = ("vllm", "model_runner_base")
"""Packages whose interfaces a vendor's code keeps to."""
_MISSING = {"ImportError", "ModuleNotFoundError", "Exception"}


def modules_with(cls: type) -> list[ModuleType]:
    """The loaded modules of a class's package, or its own module where that is in none; none if the class is ours."""
    if cls.__module__.split(".")[0] in OURS:
        return []
    package = cls.__module__.rpartition(".")[0]
    names = [name for name in sys.modules if name == cls.__module__ or (package and name.startswith(f"{package}."))]
    return [sys.modules[name] for name in sorted(names)]


def drifted_methods(modules: list[ModuleType], made: Sequence[type]) -> list[str]:
    """Describes each method that cannot be called as the one of vLLM's or of the base that it overrides.

    Classes in ``made`` are those that vLLM makes objects of; the device makes those of others, as they want it.
    """
    constructors = [cls.__init__ for cls in made]  # type: ignore[misc]
    classes = {cls: None for module in modules for cls in vars(module).values() if isinstance(cls, type)}
    names = {module.__name__ for module in modules}
    return [
        f"{cls.__qualname__}.{name} of {cls.__module__}: {words}"
        for cls in classes
        if cls.__module__ in names
        for name, override in vars(cls).items()
        if (not name.startswith("__") or override in constructors) and (words := _drift(cls, name, override))
    ]


def _drift(cls: type, name: str, override: Any) -> str | None:
    """Why the override does not fit the nearest method of vLLM's or the base's; None if it does, or is none."""
    bases = (base for base in cls.__mro__[1:] if base.__module__.split(".")[0] in OURS)
    base = next((base for base in bases if name in vars(base)), None)
    if base is None:
        return None
    overridden = vars(base)[name]
    own, theirs = _signature(override), _signature(overridden)
    if own is None or theirs is None or _says_nothing(theirs):
        return None
    where = f"{base.__module__}.{base.__qualname__}.{name}"
    # The other way round all calls go on: a class's method can be called on its objects too.
    if isinstance(override, FunctionType) and not isinstance(overridden, FunctionType):
        return f"{where} is a {type(overridden).__name__}, and this a {type(override).__name__}"
    for args, kwargs in _calls(theirs):
        try:
            own.bind(*args, **kwargs)
        except TypeError as error:
            return f"{error}, with which {where}{theirs} is called"
    return None


def _signature(value: Any) -> inspect.Signature | None:
    """Signature of a method's calls, without ``self`` or ``cls``; None if the value is no method."""
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if not isinstance(function, FunctionType):
        return None
    signature = inspect.signature(function)
    first = next(iter(signature.parameters.values()), None)
    if isinstance(value, staticmethod) or first is None or first.kind is first.VAR_POSITIONAL:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _says_nothing(signature: inspect.Signature) -> bool:
    """Whether a method takes only ``*args`` and ``**kwargs``, which do not show how it is called."""
    return all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()) and bool(
        signature.parameters
    )


def _calls(signature: inspect.Signature) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Arguments of calls that a function takes: only those that it needs, all by position, and options by name."""
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in positional if p.default is p.empty]
    by_name = {p.name: p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    options = {p.name: p.name for p in positional if p.default is not p.empty and p.kind is not p.POSITIONAL_ONLY}
    yield needed, {p.name: p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    yield [p.name for p in positional], by_name
    yield needed, by_name | options


def missing_imports(modules: list[ModuleType]) -> list[str]:
    """Describes each import from vLLM or the base, also those inside functions, that the installed release lacks.

    Imports for type checkers, those that expect an ImportError, and those between which an ``if`` chooses are left out.
    """
    found = []
    for module in modules:
        path = getattr(module, "__file__", None)
        if path and path.endswith(".py"):
            for node in _imports(ast.parse(Path(path).read_text())):
                found += [f"{path}:{node.lineno}: {name}" for name in _absent(node)]
    return found


def _imports(node: ast.AST) -> Iterator[ast.ImportFrom | ast.Import]:
    if isinstance(node, ast.ImportFrom | ast.Import):
        yield node
    if isinstance(node, ast.Try) and any(_expects_absence(handler.type) for handler in node.handlers):
        return
    if isinstance(node, ast.With) and any(_expects_absence(item.context_expr) for item in node.items):
        return
    if isinstance(node, ast.If) and ("TYPE_CHECKING" in ast.unparse(node.test) or _chooses_import(node)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _imports(child)


def _chooses_import(node: ast.If) -> bool:
    """Whether both branches import something, as for two releases."""
    branches = ([found for part in branch for found in ast.walk(part)] for branch in (node.body, node.orelse))
    return all(any(isinstance(n, ast.ImportFrom | ast.Import) for n in branch) for branch in branches)


def _expects_absence(node: ast.AST | None) -> bool:
    """Whether an exception handler, or ``suppress``, is for modules that are not there."""
    return node is None or any(isinstance(n, ast.Name) and n.id in _MISSING for n in ast.walk(node))


def _absent(node: ast.ImportFrom | ast.Import) -> list[str]:
    """Names of an import that do not exist."""
    pairs: list[tuple[str, str | None]]
    if isinstance(node, ast.Import):
        pairs = [(alias.name, None) for alias in node.names]
    elif node.level or node.module is None:
        return []
    else:
        pairs = [(node.module, alias.name) for alias in node.names]
    return [
        f"{module}.{name}" if name else module
        for module, name in pairs
        if module.split(".")[0] in OURS and not _exists(module, name)
    ]


def _exists(module: str, name: str | None) -> bool:
    """Whether a module can be imported, and has the name; one that fails is not there for the device either."""
    try:
        loaded = import_module(module)
        # The last raises ModuleNotFoundError if the module is no package.
        return name in (None, "*") or hasattr(loaded, str(name)) or find_spec(f"{module}.{name}") is not None
    except Exception:
        return False
