"""Docstrings begin with what a thing is or does, and some words are not used."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from lane import ROOT

FOLDERS = ["model_runner_base", "neuron_runner", "gpu_runner", "examples", "benchmarks", "tests"]
BAD_STARTS = {
    *"it its they their them those these this that he she we you who whose whom which what whatever same ours".split(),
    *"of as so such within around behind beside besides beyond for from in on at to by with without under over".split(),
    *"among between before after where when while until if unless else and but or nor than then there here".split(),
    *"each every all any both some none neither either most many few likewise".split(),
}
"""Pronouns, prepositions, relatives and quantities."""
BANNED = re.compile(r"\b(rooms?|houses?|joint|storeys?|nobody|whoever)\b", re.IGNORECASE)
ALLOWED = {"tests/project/test_plain_words.py"}
"""Files that name the words to say that they are not used."""

Finding = tuple[int, str]


def python_files() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in files if str(path.relative_to(ROOT)) not in ALLOWED)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes, functions, and below assignments."""
    for node in ast.walk(tree):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_docstring and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
        body = getattr(node, "body", None)
        for before, after in pairwise(body) if isinstance(body, list) else ():
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(before, ast.Assign | ast.AnnAssign) and is_text and isinstance(after.value.value, str):
                yield after.lineno, after.value.value


def bad_starts(text: str) -> list[Finding]:
    found = []
    for line, docstring in docstrings(ast.parse(text)):
        first = re.match(r"[^\w`\[(*]*([A-Za-z]+)?", docstring)
        if first and first[1] and first[1].istitle() and first[1].lower() in BAD_STARTS:
            found.append((line, docstring.strip().splitlines()[0]))
    return found


def banned_words(text: str) -> list[Finding]:
    """Finds the words in comments, docstrings and other strings."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for index, line in enumerate(token.string.splitlines()):
                if BANNED.search(line):
                    found.append((token.start[0] + index, line.strip()))
    return found


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in python_files()
        for line, text in bad_starts(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_some_words_are_not_used() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in python_files()
        for line, text in banned_words(path.read_text())
    ]
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]):
        for line, text in enumerate(path.read_text().splitlines(), start=1):
            if BANNED.search(text):
                found.append(f"{path.relative_to(ROOT)}:{line}: {text}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ('def f():\n    """Of the scheduler\'s."""\n', True),
        ('x = 1\n"""Those of one wrapper."""\n', True),
        ('def f():\n    """Scheduler blocks in this tensor."""\n', False),
        ('def f():\n    """[T] token ids; ``None`` for padding."""\n', False),
    ],
)
def test_a_docstring_that_begins_badly_is_found(text: str, is_found: bool) -> None:
    assert bool(bad_starts(text)) is is_found


def test_a_word_in_a_comment_is_found() -> None:
    assert banned_words("x = 1  # there is room\n") == [(1, "# there is room")]
