"""Refusals of the code base, read from its source: the settings that are refused, and the message of each.

A table of refusals is a dictionary named ``refusals``, whose keys are messages (``admission/limits.py``). Other
refusals are messages of ``raise UnsupportedConfigError(...)``. An expression in a message is shown by its last name:
``<method>``.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ERROR = "UnsupportedConfigError"
PACKAGES = ("model_runner_base", "neuron_runner", "gpu_runner")


def refusals() -> list[tuple[str, str]]:
    """Message and file of each refusal, in the order of the files."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if ERROR in text and "testing" not in path.parts:
                file = path.relative_to(ROOT).as_posix()
                found += [(message, file) for message in messages_of(ast.parse(text))]
    return list(dict.fromkeys(found))


def messages_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["refusals"]:
            assert isinstance(node.value, ast.Dict)
            yield from filter(is_whole, (text_of(key) for key in node.value.keys if key is not None))
        elif isinstance(node, ast.Raise):
            call = node.exc
            is_refusal = isinstance(call, ast.Call) and ast.unparse(call.func) == ERROR
            if is_refusal and isinstance(message := call.args[0], ast.Constant | ast.JoinedStr):  # type: ignore[union-attr]
                yield text_of(message)


def is_whole(message: str) -> bool:
    """Whether a message says what is refused; a dictionary of advice has only what to do instead."""
    return ":" in message or " not " in message


def text_of(node: ast.expr) -> str:
    """Text of a string of the source, with names in place of expressions."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"<{last_name(node.value)}>"
    assert isinstance(node, ast.Constant)
    return str(node.value)


def last_name(node: ast.expr) -> str:
    """The name that says most about an expression: the last attribute, name or argument in it."""
    if isinstance(node, ast.Call) and node.args:
        return last_name(node.args[-1])
    if isinstance(node, ast.Call):
        return last_name(node.func).strip("_")
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Attribute):
        return last_name(node.value) if node.attr.startswith("__") else node.attr
    if isinstance(node, ast.BoolOp):
        return last_name(node.values[-1])
    if isinstance(node, ast.Name):
        return node.id.lower()
    return "..."
