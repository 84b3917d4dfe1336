"""Explains wrong tokens: names their step, looks for a smaller case, and reruns it to look at its caches."""

from collections.abc import Iterator
from contextlib import suppress
from time import monotonic

import pytest
from vllm import LLM

from model_runner_base.testing.engine import Engines, generate, greedy, has_runner_here, tokens_of
from model_runner_base.testing.mismatch import Case, Difference, Mismatch, Replay, Rerun, describe
from model_runner_base.testing.rerun import WatchedStep, describe_cache, reference_cache, watch_case
from model_runner_base.testing.shrinking import shrink
from model_runner_base.testing.step_log import Coming, StepLog
from model_runner_base.testing.time_limit import OutOfTime, limit_steps

SECONDS = 30.0
"""Time that the search for a smaller case may take, and time that its last run may take."""


class Explanations:
    """Plugin that puts the explanation into the message of a ``Mismatch`` while its engine still runs.

    The engine is the one of the fixture ``engines``: no check has to name it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._is_shrinking = not config.getoption("no_shrinking")

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        try:
            return (yield)
        except Mismatch as mismatch:
            engines = pyfuncitem.funcargs.get("engines")
            if isinstance(engines, Engines) and engines.running is not None and has_runner_here(engines.running):
                mismatch.args = (explain(mismatch, engines.running, engines.log, self._is_shrinking),)
            raise


def explain(mismatch: Mismatch, llm: LLM, log: StepLog, is_shrinking: bool = True, seconds: float = SECONDS) -> str:
    """Sentence about the smallest case; about the case as found, with its step, if its rerun says nothing more."""
    wrong, found = mismatch.wrong, str(mismatch)
    # A faulty device may do anything; what was found stays the failure.
    with suppress(Exception):
        place = log.place_of(wrong.prompt, wrong.tokens, wrong.output)
        found = found if place is None else f"{found}; {place}"
    if mismatch.replay is None:
        return found
    try:
        return _Explainer(mismatch.replay, llm, seconds).explain(found, is_shrinking)
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
        return f"{found}; its rerun raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"


class _Explainer:
    """Reruns of one mismatch."""

    def __init__(self, replay: Replay, llm: LLM, seconds: float) -> None:
        self._name, self._model, self._llm, self._replay = replay.name, replay.model, llm, replay
        self._seconds, self._run = seconds, replay.run
        self._end = 0.0
        """Time at which a run is cut."""
        self._got: list[list[int]] = []
        """Tokens of the last run."""

    def explain(self, found: str, is_shrinking: bool) -> str:
        self._end = monotonic() + self._seconds
        case, difference, is_cut = self._replay.case, self._replay.difference, False
        try:
            # Where one of several is wrong on its own, its way of arriving does not matter.
            if (
                is_shrinking
                and self._run is not None
                and len(case.prompts) > 1
                and self._is_wrong_alone(case, difference.request)
            ):
                self._run = None
        except OutOfTime:
            is_cut = True
        if is_shrinking:
            case, difference, is_cut = shrink(case, difference, self._fails, self._end - monotonic())
        cut = f"; the search for a smaller case was cut after {self._seconds:g} s" if is_cut else ""
        self._end = monotonic() + self._seconds
        try:
            with watch_case(self._llm) as steps:
                again = self._fails(case)
        except OutOfTime:
            return f"{found}{cut}; its rerun was cut after {self._seconds:g} s"
        if again is None:
            return f"{found}{cut}; right when it runs again"
        sentence = f"{self._name}, {describe(case, again)}"
        with suppress(LookupError, ValueError):  # A step's trace may lack what the sentence says of it.
            sentence = self._describe(case, again, steps)
        return sentence + cut

    def _is_wrong_alone(self, case: Case, index: int) -> bool:
        own = Case([case.prompts[index]], [case.counts[index]])
        return self._compare(own, _generate) is not None

    def _fails(self, case: Case) -> Difference | None:
        return self._compare(case, self._run or _generate)

    def _compare(self, case: Case, run: Rerun) -> Difference | None:
        with limit_steps(self._llm, self._end):
            self._llm.reset_prefix_cache()
            self._got = run(self._llm, *case)
        return self._replay.compare(case, self._got)

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
        came = Coming.of([step.trace.requests[request].positions[0] for step in own], len(prompt))
        sentence = f"{self._name}, {describe(case, difference, str(came))}; {last}"
        right = self._got[difference.request][: difference.output]
        try:
            wanted = reference_cache(self._model, (*prompt, *right))
        except Exception:  # A model whose cache in transformers is of another kind.
            return sentence
        cache = describe_cache(own, request, wanted)
        return f"{sentence}; {cache}" if cache else sentence


def _generate(llm: LLM, prompts: list[tuple[int, ...]], counts: list[int]) -> list[list[int]]:
    return tokens_of(generate(llm, prompts, [greedy(count) for count in counts]))
