"""Requests that no honest client sends, among honest ones."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from vllm import LLM, RequestOutput

from model_runner_base.testing import hostile
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy
from model_runner_base.testing.leftovers import check_nothing_left, count_infos
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

BATCH = 6
"""Largest number of hostile requests at a time; more than half as many come on average."""
NUM_BATCHES = 40
HONEST = random_prompts(77, [5, 40, 9])
COUNT = 12
SECONDS = 20
"""Time after which a batch counts as waiting for ever; one takes a fraction of a second."""


class Round:
    """Honest requests with hostile ones among them, and aborts and resets while they run."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self.outputs: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}

    def send(self, name: str, prompt: Sequence[int], params: Any) -> None:
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        self.sent[name] = params

    def send_hostile(self, name: str, prompt: Sequence[int], fields: dict[str, Any]) -> None:
        """Sends a request, and checks that it is either queued, or refused with an error and not queued."""
        num_before = self._engine.get_num_unfinished_requests()
        try:
            self.send(name, prompt, hostile.make(fields))
        except Exception:
            num_queued = self._engine.get_num_unfinished_requests() - num_before
            assert not num_queued, f"{fields} was refused, and is queued all the same"

    def run(self, aborts: dict[int, str], resets: set[int]) -> None:
        """Steps until all requests are done; aborts requests and resets the prefix cache at the given steps."""
        deadline = time.monotonic() + SECONDS
        step = 0
        while self._engine.has_unfinished_requests():
            assert time.monotonic() < deadline, f"a request waits for ever, of {self.sent}"
            if step in aborts:
                self._engine.abort_request([aborts[step]])
            if step in resets:
                self._llm.reset_prefix_cache(reset_running_requests=True)
            for output in self._engine.step():
                assert isinstance(output, RequestOutput)
                self.outputs[output.request_id] = output.outputs[0]
            step += 1

    def check(self, name: str) -> None:
        """Checks the tokens of a hostile request for the simple rules: ``max_tokens`` and ``allowed_token_ids``."""
        output, params = self.outputs.get(name), self.sent[name]
        if output is None or output.finish_reason in ("abort", "error"):
            return
        tokens = list(output.token_ids)
        assert len(tokens) <= params.max_tokens, f"{params}: {tokens}"
        if params.allowed_token_ids is not None:
            assert set(tokens) <= set(params.allowed_token_ids), f"{params}: {tokens}"


batches = st.tuples(
    st.lists(st.tuples(hostile.prompts, hostile.params), min_size=1, max_size=BATCH),
    st.dictionaries(st.integers(0, 12), st.integers(0, BATCH - 1), max_size=2),
    st.sets(st.integers(0, 12), max_size=1),
)


def test_hostile_requests(text_engine: Callable[..., LLM], text_model: TinyModel, pytestconfig: pytest.Config) -> None:
    """Hostile requests end nothing else, never wait for ever and leave nothing; honest ones among them are right."""
    llm = text_engine()
    num_infos = count_infos()
    soak = pytestconfig.getoption("soak")
    num_batches = max(NUM_BATCHES, 2 * soak // (1 + BATCH))

    @seed(1 + soak)
    @settings(
        max_examples=num_batches,
        deadline=None,
        database=None,
        phases=set(Phase) - ({Phase.shrink} if pytestconfig.getoption("no_shrinking") else set()),
        suppress_health_check=list(HealthCheck),
    )
    @given(batches)
    def check(batch: tuple[list[tuple[list[int], dict[str, Any]]], dict[int, int], set[int]]) -> None:
        requests, aborts, resets = batch
        done = Round(llm)
        for index, prompt in enumerate(HONEST):
            done.send(f"hostile-honest-{index}", list(prompt), greedy(COUNT))
        for index, (tokens, fields) in enumerate(requests):
            done.send_hostile(f"hostile-{index}", tokens, fields)
        done.run({step: f"hostile-{index}" for step, index in aborts.items()}, resets)
        got = [list(done.outputs[f"hostile-honest-{index}"].token_ids) for index in range(len(HONEST))]
        check_equal(text_model, HONEST, got, [COUNT] * len(HONEST), where="normal request")
        for name in done.sent:
            done.check(name)
        assert not llm.llm_engine.output_processor.request_states, "the front end keeps what is refused"

    check()
    generate(llm, HONEST[:1], greedy(3))  # The runner is told of the last that ended, and has another batch.
    check_nothing_left(llm, "hostile-", num_infos, known=1)
