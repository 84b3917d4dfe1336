"""Comparisons of tokens: one short sentence says what differs, without whole prompts.

All checks compare tokens by these functions, directly or by ``reference.check_tokens``. What they raise says enough for
``explanation.py`` to name the step, and to run the case again where there is a way to.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.words import counted

MOST_FLIPS = 0.25
"""Largest share of tokens that rounding makes others of, where two runs of a device are compared: of the tiny models
it is less than a tenth."""

Prompt = tuple[int, ...]
Rerun = Callable[[Any, list[Prompt], list[int]], list[list[int]]]
"""Function that runs prompts anew in an engine, each for a count of tokens, and returns the tokens of each."""


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
    why: str = ""
    """Words in place of the right token, where several are right."""
    hint: str = ""
    """Possible fault, at the end of the words."""

    def __str__(self) -> str:
        return f"{self._words()} ({self.hint})" if self.hint else self._words()

    def _words(self) -> str:
        if self.why:
            return f"output {self.output} is {self.got}, {self.why}"
        if self.got is None:
            return f"output {self.output} is missing, {self.want} is right"
        if self.want is None:
            return f"output {self.output} is {self.got}, after the right end"
        return f"output {self.output} is {self.got}, not {self.want}"


class Case(NamedTuple):
    """Prompts that ran together, and for how many tokens each."""

    prompts: list[Prompt]
    counts: list[int]


class Wrong(NamedTuple):
    """Request with wrong tokens, or with a wrong vector."""

    prompt: Prompt
    tokens: list[int]
    """Tokens that it had; empty if it is pooled."""
    output: int = 0
    """Index of the first wrong one, or of the first that is missing."""


class Replay(NamedTuple):
    """Reference and means to run a case again."""

    name: str
    """Beginning of its sentence, such as the name of the model."""
    model: TinyModel
    """Reference, whose keys and values are right after the same tokens."""
    case: Case
    difference: Difference
    compare: Callable[[Case, list[list[int]]], Difference | None]
    run: Rerun | None
    """How the prompts came; None: all at once, as greedy requests."""


class Mismatch(AssertionError):
    """Tokens, or a vector, that are not the right ones: a sentence, the request, and what is needed to run the case
    again if that is possible."""

    def __init__(self, sentence: str, wrong: Wrong, replay: Replay | None = None) -> None:
        super().__init__(sentence)
        self.wrong, self.replay = wrong, replay


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


def check_equal(
    model: TinyModel,
    prompts: Sequence[Prompt],
    got: Sequence[Sequence[int]],
    counts: Sequence[int],
    rerun: Rerun | None = None,
    where: str = "",
    until: Callable[[list[int]], list[int]] = lambda tokens: tokens,
    hint: str = "",
) -> None:
    """Asserts that greedy tokens are the reference's; in a dtype that rounds, but for rounding.

    Args:
        rerun: how the prompts were run; None: all at once, by ``generate``.
        where: words for the beginning of the sentence, in place of the model's name.
        until: function that cuts the right tokens where a request ends early.
        hint: what the fault may be.

    Raises:
        Mismatch: for the request whose output differs first.
    """
    case, name = Case([tuple(prompt) for prompt in prompts], list(counts)), where or model.path.name

    def compare(case: Case, got: Sequence[Sequence[int]]) -> Difference | None:
        right = _right_tokens(model, case, got)
        found = first_difference(got, [until(tokens) for tokens in right])
        return found and found._replace(hint="; ".join(filter(None, [hint, _moves(model, case, got, found)])))

    if difference := compare(case, got):
        wrong = Wrong(case.prompts[difference.request], list(got[difference.request]), difference.output)
        replay = Replay(name, model, case, difference, compare, rerun)
        raise Mismatch(f"{name}, {describe(case, difference)}", wrong, replay)


def _moves(model: TinyModel, case: Case, got: Sequence[Sequence[int]], found: Difference) -> str:
    """Words for how much rounding moves the logits that a wrong token is taken from; none in float32."""
    if PRECISION.is_exact:
        return ""
    fed = [*case.prompts[found.request], *got[found.request][: found.output]]
    return f"{PRECISION.name} moves logits by {model.tolerances(fed, 0.0)[-1]:.2f} there"


def _right_tokens(model: TinyModel, case: Case, got: Sequence[Sequence[int]]) -> list[list[int]]:
    if PRECISION.is_exact:
        return [model.greedy(*each) for each in zip(*case, strict=True)]
    return [model.right_tokens(*each) for each in zip(*case, got, strict=True)]


def check_same(
    got: Sequence[Sequence[int]],
    want: Sequence[Sequence[int]],
    names: Sequence[object],
    prompts: Sequence[Sequence[int]],
    hint: str = "",
) -> None:
    """Asserts that lists of tokens are equal, one for each name and prompt; in a dtype that rounds, that few differ.

    Args:
        hint: what the fault may be.

    Raises:
        Mismatch: for the request whose output differs first.
    """
    difference = first_difference(got, want)
    is_rounding = not PRECISION.is_exact and _is_rounding(got, want)
    if difference and not (is_rounding and None not in (difference.got, difference.want)):
        index = difference.request
        wrong = Wrong(tuple(prompts[index]), list(got[index]), difference.output)
        raise Mismatch(f"{names[index]}: {difference._replace(hint=hint)}", wrong)


def _is_rounding(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> bool:
    """Whether rounding explains that lists of tokens differ: few of them do, each from some place on."""
    num_same = num_flips = 0
    for tokens, right in zip(got, want, strict=True):
        difference = first_difference([tokens], [right])
        num_same += difference.output if difference else len(right)
        num_flips += difference is not None
    PRECISION.note(num_same, sum(map(len, want)))
    return num_flips <= MOST_FLIPS * (num_same + num_flips)
