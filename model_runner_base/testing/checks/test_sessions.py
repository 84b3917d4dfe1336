"""Streaming-input sessions: the tokens of each turn are those of the session's prompt so far, without a session."""

from collections.abc import Callable

import numpy as np
import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import require_small_blocks
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.sessions import Driver, Session

CHUNKS = random_prompts(150, [5, 20, 12, 30, 10, 9, 9, 3, 1])
"""Input of three sessions, three chunks each."""
PLAIN = random_prompts(151, [33, 3, 90, 60])


# The scope sorts the checks by kind of scheduling: those of one share an engine.
@pytest.fixture(scope="module", params=[True, False], ids=["asynchronous", "synchronous"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def driver(is_async: bool, engine: Callable[..., LLM], text_model: TinyModel) -> Driver:
    """An engine of three rows, whose cache has 13 blocks and the null block."""
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 96, "max_model_len": 160}
    limits |= {"long_prefill_token_threshold": 32}  # Chunks, of which a step may have one of each request.
    blocks = {"block_size": 16, "num_gpu_blocks_override": 14}
    return Driver(engine(text_model.path, async_scheduling=is_async, **limits, **blocks))


def run_to_end(driver: Driver, chance: float) -> None:
    """Runs steps to the end; sessions get input with a chance at each step."""
    rng = np.random.default_rng(8)
    for _ in range(2000):
        if not driver.is_open():
            return
        for session in driver.sessions.values():
            if session.sent <= len(session.chunks) and rng.random() < chance:
                driver.feed(session)
        driver.step()
    raise AssertionError("a session or request never ends")


def test_turns_among_other_requests(driver: Driver, text_model: TinyModel) -> None:
    """Turns of sessions that wait for input between other requests, and lose their rows to these."""
    for index, prompt in enumerate(PLAIN):
        if index < 3:
            driver.open(Session(f"session {index}", CHUNKS[3 * index : 3 * index + 3]))
        driver.ask(f"plain {index}", prompt)
        for _ in range(3 + 2 * index):
            driver.step()
    run_to_end(driver, 0.1)
    driver.check(text_model)


def test_preempted_turns(driver: Driver, text_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session is preempted within a turn, as blocks are few, and resumes with all of its tokens."""
    scheduler = driver.core.scheduler
    preempt, preempted = scheduler._preempt_request, list[str]()

    def noting(request: object, *args: object, **kwargs: object) -> None:
        preempted.append(request.request_id)  # type: ignore[attr-defined]
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", noting)
    # Enough blocks for both sessions to their end, not for the growth of all three requests at once.
    driver.ask("plain", random_prompts(152, [60])[0])
    for name in ("first", "second"):
        driver.open(Session(name, random_prompts(len(name), [60, 4, 4])))
        for _ in range(3):
            driver.feed(driver.sessions[name])
    run_to_end(driver, 0)
    driver.check(text_model)
    if not preempted:
        require_small_blocks("no request is preempted")
    assert "second" in preempted, "no session was preempted"
