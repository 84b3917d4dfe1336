"""Explains wrong tokens: looks for a smaller case, and runs it again with a trace of its steps and caches."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
from vllm import LLM

from model_runner_base.testing.cache_trace import WatchedStep, describe_cache, reference_cache, watch_case
from model_runner_base.testing.engine import generate, greedy, tokens_of
from model_runner_base.testing.mismatch import Case, Difference, TokenMismatch, compare, describe
from model_runner_base.testing.shrinking import shrink
from model_runner_base.testing.words import counted

SECONDS = 30.0
"""Time that the search for a smaller case may take."""


class Explanations:
    """Plugin that puts the explanation into the message of a ``TokenMismatch`` while its engine still runs."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds = 0.0 if config.getoption("no_shrinking") else SECONDS

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        try:
            return (yield)
        except TokenMismatch as mismatch:
            if mismatch.llm is not None:
                mismatch.args = (explain(mismatch, mismatch.llm, self._seconds),)
            raise


def explain(mismatch: TokenMismatch, llm: LLM, seconds: float) -> str:
    """Sentence about the smallest case; about the case as found if its rerun is right or raises."""
    found = str(mismatch)
    try:
        return Explainer(mismatch, llm).explain(seconds)
    # A faulty device may do anything; what was found stays the failure.
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
        return f"{found}; its rerun raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"


class Explainer:
    """Reruns of one mismatch."""

    def __init__(self, mismatch: TokenMismatch, llm: LLM) -> None:
        self._model, self._llm, self._found = mismatch.model, llm, mismatch
        self._rerun = mismatch.rerun

    def explain(self, seconds: float) -> str:
        case, difference = self._found.case, self._found.difference
        if self._rerun is not None and self._alone(case, difference):
            self._rerun = None  # Its way of arriving does not matter.
        if seconds:
            case, difference = shrink(case, difference, self._fails, seconds)
        with watch_case(self._llm) as steps:
            again = self._fails(case)
        sentence = f"{self._model.path.name}, {describe(case, again or difference, '')}"
        if again is None:
            return f"{sentence}; right when it runs again"
        with suppress(LookupError):  # A step's trace may lack what the sentence says of it.
            sentence = self._describe(case, again, steps)
        return sentence

    def _alone(self, case: Case, difference: Difference) -> bool:
        """Whether the request is wrong, too, when it runs on its own."""
        self._llm.reset_prefix_cache()
        alone = Case([case.prompts[difference.request]], [case.counts[difference.request]])
        return compare(self._model, alone, self._generate(*alone)) is not None

    def _fails(self, case: Case) -> Difference | None:
        self._llm.reset_prefix_cache()
        return compare(self._model, case, (self._rerun or self._generate)(*case))

    def _generate(self, prompts: list[tuple[int, ...]], counts: list[int]) -> list[list[int]]:
        return tokens_of(generate(self._llm, prompts, [greedy(count) for count in counts]))

    def _describe(self, case: Case, difference: Difference, steps: list[WatchedStep]) -> str:
        prompt = case.prompts[difference.request]
        sampled_at = len(prompt) + difference.output
        named = [name for step in steps for name, its in step.prompts.items() if its == prompt]
        # Of requests with one prompt, the one that came as late as this one.
        request = list(dict.fromkeys(named))[case.prompts[: difference.request].count(prompt)]
        own = [step for step in steps if request in step.trace.requests]
        places = [(step.trace.requests[request].sampled.position, step) for step in own]
        # Where drafts were accepted, the step begins with an earlier token.
        place = max(position for position, _ in places if position <= sampled_at)
        last = [step for position, step in places if position == place][-1]
        own = [step for step in own if step.number <= last.number]
        sentence = f"{self._model.path.name}, {describe(case, difference, _how(own, request, len(prompt)))}; {last}"
        right = self._model.greedy(prompt, difference.output) if difference.output else []
        try:
            wanted = reference_cache(self._model, (*prompt, *right))
        except Exception:  # A model whose cache in transformers is of another kind.
            return sentence
        cache = describe_cache(own, request, wanted)
        return f"{sentence}; {cache}" if cache else sentence


def _how(steps: list[WatchedStep], request: str, length: int) -> str:
    """How a prompt came, as far as the steps show it: chunks, tokens of the prefix cache, preemptions."""
    starts = [step.trace.requests[request].positions[0] for step in steps]
    num_chunks = sum(start < length for start in starts)
    text = f" in {num_chunks} chunks" if num_chunks > 1 else ""
    if starts[0]:
        text += f", {starts[0]} of them cached"
    num_preemptions = sum(after < before for before, after in pairwise(starts))
    return text + (f", preempted {counted(num_preemptions, 'time')}" if num_preemptions else "")
