"""Comparison of tokens with the reference's: one short sentence says what differs, without whole prompts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.words import counted

Prompt = tuple[int, ...]
Rerun = Callable[[list[Prompt], list[int]], list[list[int]]]
"""Function that runs prompts anew, each for a count of tokens, and returns the tokens of each."""


class Difference(NamedTuple):
    """First output that differs from what is wanted."""

    request: int
    """Index of the request."""
    output: int
    """Index of the output token, from 0."""
    got: int | None
    """The token; None where the output has ended."""
    want: int | None
    """The right token; None where the output should have ended."""

    def __str__(self) -> str:
        if self.got is None:
            return f"output {self.output} is missing, {self.want} is right"
        if self.want is None:
            return f"output {self.output} is {self.got}, after the right end"
        return f"output {self.output} is {self.got}, not {self.want}"


class Case(NamedTuple):
    """Prompts that ran together, and for how many tokens each."""

    prompts: list[Prompt]
    counts: list[int]


class TokenMismatch(AssertionError):
    """Tokens of a case that differ from the reference's, and what is needed to run the case again."""

    def __init__(
        self, model: TinyModel, case: Case, difference: Difference, llm: Any | None = None, rerun: Rerun | None = None
    ) -> None:
        super().__init__(f"{model.path.name}, {describe(case, difference)}")
        self.model, self.case, self.difference, self.llm, self.rerun = model, case, difference, llm, rerun


def describe(case: Case, difference: Difference, how: str = "") -> str:
    """Sentence about one request of a case; ``how`` says how its prompt came, such as " in 3 chunks"."""
    others = len(case.prompts) - 1
    company = f", with {counted(others, 'other request')}" if others else ""
    return f"prompt of {counted(len(case.prompts[difference.request]), 'token')}{how}{company}: {difference}"


def first_difference(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> Difference | None:
    """The earliest output that differs in any request, or None."""
    found = []
    for index, (tokens, right) in enumerate(zip(got, want, strict=True)):
        if list(tokens) != list(right):
            at = next((i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b), None)
            at = min(len(tokens), len(right)) if at is None else at
            found.append(Difference(index, at, _at(tokens, at), _at(right, at)))
    return min(found, key=lambda difference: difference.output, default=None)


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None


def compare(model: TinyModel, case: Case, got: list[list[int]]) -> Difference | None:
    """First difference from the reference's greedy tokens, or None."""
    want = [model.greedy(prompt, count) for prompt, count in zip(case.prompts, case.counts, strict=True)]
    return first_difference(got, want)


def check_equal(
    model: TinyModel,
    prompts: list[Prompt],
    got: list[list[int]],
    counts: list[int],
    llm: Any | None = None,
    rerun: Rerun | None = None,
) -> None:
    """Asserts that greedy tokens are the reference's.

    Args:
        llm: the engine, if prompts may be run in it again to find out where they go wrong.
        rerun: how the prompts were run; None: all at once, by ``generate``.

    Raises:
        TokenMismatch: for the request whose output differs first.
    """
    case = Case(list(prompts), list(counts))
    if difference := compare(model, case, got):
        raise TokenMismatch(model, case, difference, llm, rerun)


def check_same(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]], names: Sequence[object]) -> None:
    """Asserts that lists of tokens are equal, one for each name."""
    if difference := first_difference(got, want):
        raise AssertionError(f"{names[difference.request]}: {difference}")
