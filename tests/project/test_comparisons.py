"""Comparisons of tokens in the kit: all go through ``mismatch.py``, so that each failure names its step."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTING = Path(__file__).parents[2] / "model_runner_base" / "testing"
OF_TOKENS = {"greedy", "tokens_of", "best_tokens", "thought", "expected", "read"}
"""Functions that return tokens; ``greedy`` as a model's method."""
NOT_TOKENS = {"len", "set", "decode", "text_after", "metric", "sum", "any"}
"""Functions whose results are no tokens, whatever they are given."""
OWN = {"mismatch.py", "reference.py"}
"""Modules that compare tokens for all others."""
ALLOWED = {
    "brute_force.py, _check_tokens": "tokens that a step is given",
    "completions.py, check_ending": "why a request ends",
    "logprobs.py, check_chosen": "tokens whose log probabilities are given",
    "test_multimodal.py, check_read": "prompts",
    "test_sampling.py, test_end_of_sequence": "a token that the reference has been asked about before",
}
"""Functions that compare something else of tokens, and what."""
FILES = [*TESTING.glob("*.py"), *(TESTING / "checks").glob("*.py")]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def has_tokens(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression has tokens: of a function or an output, or of a variable with such."""
    if isinstance(node, ast.Call):
        if name_of(node) in NOT_TOKENS:
            return False
        is_params = name_of(node) == "greedy" and isinstance(node.func, ast.Name)
        if name_of(node) in OF_TOKENS and not is_params:
            return True
        return not is_params and any(has_tokens(each, known) for each in node.args)
    if isinstance(node, ast.SetComp | ast.Compare):
        return False
    if isinstance(node, ast.Attribute):
        return node.attr == "token_ids"
    if isinstance(node, ast.Name):
        return node.id in known
    return any(has_tokens(each, known) for each in ast.iter_child_nodes(node))


def names_in(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def comparisons(text: str) -> Iterator[str]:
    """Assertions of a module that tokens are equal to others."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        known: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and has_tokens(node.value, known):
                known |= {name for target in node.targets for name in names_in(target)}
            elif isinstance(node, ast.For | ast.comprehension) and has_tokens(node.iter, known):
                known |= names_in(node.target)
        for node in ast.walk(function):
            test = node.test if isinstance(node, ast.Assert) else None
            for each in ast.walk(test) if test is not None else ():
                is_equality = isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.Eq | ast.NotEq)
                if is_equality and any(has_tokens(side, known) for side in ast.iter_child_nodes(each)):
                    yield f"{function.name}: {ast.unparse(each)}"


@pytest.mark.once
def test_no_check_compares_tokens_by_itself() -> None:
    """A vendor reads the step and, where there is a reference, the cache's slot, whichever check fails."""
    found = [f"{path.name}, {each}" for path in FILES if path.name not in OWN for each in comparisons(path.read_text())]
    assert [each for each in found if each.partition(":")[0] not in ALLOWED] == []
    assert ALLOWED.keys() == {each.partition(":")[0] for each in found}


@pytest.mark.once
def test_comparisons_are_found() -> None:
    """A comparison is found whatever the names of its variables are; counts and texts of tokens are none."""
    for line in (
        "assert tokens_of(outputs) == [[1]]",
        "(mine,) = tokens_of(outputs)\n    assert mine == model.greedy(prompt, 3)",
        "for prompt, want in zip(prompts, [model.greedy(p, 3) for p in prompts]):\n        assert got[prompt] == want",
        "assert [c.token_ids for c in first] == [c.token_ids for c in again]",
    ):
        assert [*comparisons(f"def check():\n    {line}")], line
    for line in (
        "assert len(tokens_of(outputs)) == 3",
        "outputs = generate(llm, prompts, greedy(3))\n    assert outputs[0].num_cached_tokens == 16",
        "assert text == tokenizer.decode(model.greedy(prompt, 3))",
    ):
        assert not [*comparisons(f"def check():\n    {line}")], line
