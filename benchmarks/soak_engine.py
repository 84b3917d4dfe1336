"""One engine of ``soak``: requests that come and go at random, what they yielded, and what they left behind."""

import gc
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, CompletionOutput
from vllm.inputs import TokensPrompt

from model_runner_base.testing.engine import generate, greedy, metric, runner_of
from model_runner_base.testing.leftovers import check_nothing_left, count_infos
from model_runner_base.testing.reference import Request
from model_runner_base.vllm_compat.types.outputs import AsyncModelRunnerOutput

NAME = "soak-"
LOGPROB_TOLERANCE = 1e-3
COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "prefix_hits": "vllm:prefix_cache_hits",
    "rounds": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


@dataclass(slots=True)
class Answer:
    """A completion, so far."""

    tokens: list[int]
    text: str
    logprobs: list[float] | None
    """Log probabilities of the tokens."""
    reason: tuple[Any, Any]

    @classmethod
    def of(cls, output: CompletionOutput) -> "Answer":
        tokens = list(output.token_ids)
        logprobs = None
        every: Any = output.logprobs
        if every is not None:
            logprobs = [each[token].logprob for token, each in zip(tokens, every, strict=True)]
        return cls(tokens, output.text, logprobs, (output.finish_reason, output.stop_reason))


@dataclass(slots=True)
class Result:
    number: int
    num_completions: int
    is_aborted: bool = False
    answers: dict[int, Answer] = field(default_factory=dict)


@dataclass
class Traffic:
    """Arrival of requests: up to ``most`` at once, some of them aborted."""

    most: int
    arrivals: float = 0.5
    """Chance that one more comes before a step."""
    pauses: float = 0.0
    """Chance that none comes any more until all have ended."""
    aborted: float = 0.0
    """Share of requests that are aborted within the next steps, unless they end before."""


class Soak:
    """Runs requests through an engine and counts."""

    def __init__(self, llm: LLM, request_of: Callable[[int], Request], traffic: Traffic, seed: int = 0) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self._request_of = request_of
        self._traffic, self._random = traffic, random.Random(seed)
        self._running: dict[str, Result] = {}
        self._abort_at: dict[str, int] = {}
        self._num_infos = count_infos()
        self._num_outputs = _count_outputs()
        self._before = {name: metric(llm, counter) for name, counter in COUNTERS.items()}
        self.steps = self.tokens = self.aborts = 0

    def run(self, numbers: Iterable[int]) -> dict[int, Result]:
        """Runs the requests to their ends, and returns their results."""
        waiting, results = list(numbers)[::-1], {}
        traffic, rng = self._traffic, self._random
        pausing = False
        while waiting or self._engine.has_unfinished_requests():
            pausing = bool(self._running) and (pausing or rng.random() < traffic.pauses)
            while waiting and not pausing and len(self._running) < traffic.most and rng.random() < traffic.arrivals:
                number = waiting.pop()
                results[number] = self._add(number)
            for name in [name for name, step in self._abort_at.items() if step <= self.steps]:
                self._abort(name)
            self._step()
        return results

    def _add(self, number: int) -> Result:
        request, name = self._request_of(number), f"{NAME}{number}"
        params = request.params.clone()
        result = self._running[name] = Result(number, params.n)
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=list(request.prompt)), params)
        if self._random.random() < self._traffic.aborted:
            self._abort_at[name] = self.steps + self._random.randint(0, 20)
        return result

    def _abort(self, name: str) -> None:
        self._engine.abort_request([name])
        self._running.pop(name).is_aborted = True
        del self._abort_at[name]
        self.aborts += 1

    def _step(self) -> None:
        self.steps += 1
        for output in self._engine.step():
            result = self._running[output.request_id]
            for completion in output.outputs:  # type: ignore[union-attr]
                answer = result.answers[completion.index] = Answer.of(completion)  # type: ignore[arg-type, union-attr]
                self.tokens += len(answer.tokens) if completion.finish_reason else 0  # type: ignore[union-attr]
            if output.finished:
                del self._running[output.request_id]
                self._abort_at.pop(output.request_id, None)

    def check_nothing_left(self) -> None:
        """Checks that no request, row, block, entry or output of a step is left.

        Some parts of the runner remember the last steps, such as those that look back on outputs by themselves. So one
        more request comes, of another name.
        """
        generate(self._llm, [(5, 6, 7)], greedy(8, bad_words=["q"]))
        for _ in range(4):  # The end of a request is told in the step after it, which may be read one later.
            self._engine.step()
        assert not self._engine.output_processor.request_states
        requests = runner_of(self._llm).parts.requests
        assert not requests.rows and not requests.infos, f"{requests.rows}, {requests.infos}"
        check_nothing_left(self._llm, NAME, self._num_infos, known=1)
        left = _count_outputs() - self._num_outputs
        assert left <= 0, f"{left} outputs of steps are held"

    def counts(self) -> dict[str, float]:
        """Growth of the engine's counters since the beginning."""
        return {name: metric(self._llm, counter) - self._before[name] for name, counter in COUNTERS.items()}


def _count_outputs() -> int:
    """Number of outputs of steps, read or not, in the whole process."""
    gc.collect()
    return sum(isinstance(thing, AsyncModelRunnerOutput) for thing in gc.get_objects())


def first_difference(got: Answer, want: Answer, is_aborted: bool) -> int | None:
    """Index of the first token that differs, or the number of tokens where one answer ends too soon; None if all is
    right.

    Of an aborted request the tokens so far must be right. A stop string ends the text, but the step in which it is
    found may have yielded more tokens.
    """
    is_whole = not is_aborted or got.reason[0] is not None
    stops_by_text = isinstance(want.reason[1], str)
    length = min(len(got.tokens), len(want.tokens))
    for place in range(length):
        if got.tokens[place] != want.tokens[place]:
            return place
    if len(got.tokens) > length and not stops_by_text:
        return length
    if is_whole and (len(want.tokens) > length or (got.text, got.reason) != (want.text, want.reason)):
        return length
    if (got.logprobs is None) != (want.logprobs is None):
        return 0
    for place, (one, other) in enumerate(zip(got.logprobs or (), want.logprobs or (), strict=False)):
        if abs(one - other) > LOGPROB_TOLERANCE:
            return place
    return None
