"""Streaming-input sessions: a session's tokens are those of its prompt so far, without a session.

vLLM's rule: when the next chunk of input comes, the outputs whose keys and values were computed become part of the
prompt (all but the last), and the chunk follows them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import engine
from greedy import generate
from vllm import LLM, SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.kept_blocks import KeptBlocks, transfer_config
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request, check_tokens
from model_runner_base.testing.sessions import OUTPUTS, Driver, Session


@pytest.mark.parametrize(
    ("is_async", "caching", "drafts", "has_stops"),
    [
        (True, True, None, False),
        (True, False, None, True),
        (False, True, None, True),
        (False, False, None, False),
        (True, True, "same", False),
        (True, False, "head", True),
        (False, True, "ngram", True),
        (False, False, "noisy", False),
    ],
)
def test_sessions_among_other_requests(
    is_async: bool, caching: bool, drafts: str | None, has_stops: bool, tiny_model: Callable[[str], TinyModel]
) -> None:
    """More sessions and requests than rows: a waiting session loses its row, and comes back with its cache.

    Turns end in the middle of accepted drafts, and while the next step is in flight.
    """
    model = tiny_model("llama")
    rng = np.random.default_rng(7)
    prompts = random_prompts(30, [5, 30, 70, 1, 20, 45, 3, 3, 60, 12, 1, 9] * 2)
    options = {"async_scheduling": is_async, "enable_prefix_caching": caching, "num_gpu_blocks_override": 40}
    if drafts is not None:
        options["speculative_config"] = speculation(drafts, model)  # type: ignore[assignment]
    with engine(
        model.path, max_model_len=256, max_num_seqs=3, max_num_batched_tokens=32, enforce_eager=True, **options
    ) as llm:
        driver = Driver(llm)
        if has_stops:
            driver.stops = sorted({model.greedy(prompts[3 * i], OUTPUTS)[3] for i in range(5)})
        taken_over = 0
        waiting = [Session(f"session-{i}", prompts[3 * i : 3 * i + 3]) for i in range(5)]
        for index in range(6):
            if index < 5:
                driver.open(waiting[index])
            driver.ask(f"plain-{index}", prompts[15 + index])
            for _ in range(int(rng.integers(1, 12))):
                driver.step()
        for step in range(2000):
            if not driver.is_open():
                break
            idle = [s for s in driver.sessions.values() if s.sent <= len(s.chunks) and rng.random() < 0.05]
            for session in idle:
                driver.feed(session)
            requests = driver.runner.parts.requests
            taken_over += sum(name not in requests.rows for name in requests.infos)
            if step % 15 == 0 and step < 150:
                driver.ask(f"late-{step}", prompts[step % 24])
            driver.step()
        assert not driver.is_open()
        assert taken_over > 10, "no waiting session lost its row"
        driver.check(model)


@pytest.mark.parametrize(
    ("is_async", "elsewhere"),
    [
        (True, {}),
        (False, {}),
        (True, {"kv_offloading_size": 0.01}),
        (False, {"kv_transfer_config": transfer_config()}),
    ],
    ids=["async", "sync", "async, blocks on the host", "sync, a connector"],
)
def test_preempted_sessions(is_async: bool, elsewhere: dict[str, Any], tiny_model: Callable[[str], TinyModel]) -> None:
    """A session is preempted in the middle of a chunk, as blocks are few, and resumes with all of its tokens.

    With a KV connector it may load what it resumes with.
    """
    KeptBlocks.forget()
    model = tiny_model("llama")
    options = {"async_scheduling": is_async, "block_size": 16, "num_gpu_blocks_override": 14} | elsewhere
    with engine(model.path, max_model_len=160, max_num_seqs=3, enforce_eager=True, **options) as llm:
        for turn in range(2 if elsewhere else 1):
            num_loaded = check_preempted(llm, model)
            assert num_loaded or not turn, "a prompt that comes again is not loaded"
            generate(llm, random_prompts(41, [5]))  # Stores begin with the next step.
            assert llm.reset_prefix_cache()


def check_preempted(llm: LLM, model: TinyModel) -> int:
    """Returns the number of tokens that were loaded."""
    driver = Driver(llm)
    # 13 blocks: enough for both sessions to their end, not for the growth of all three requests at once.
    driver.ask("plain", random_prompts(40, [60])[0])
    for name in ("first", "second"):
        driver.open(Session(name, random_prompts(len(name), [60, 4, 4])))
        for _ in range(3):
            driver.feed(driver.sessions[name])
    requests = dict(driver.core.scheduler.requests)
    for _ in range(500):
        if not driver.is_open():
            break
        driver.step()
    assert requests["second"].num_preemptions, "nothing was preempted"
    driver.check(model)
    return driver.num_loaded


def test_penalties_count_the_prompt_so_far(tiny_model: Callable[[str], TinyModel]) -> None:
    """Penalties count the tokens of each chunk, and the outputs that became part of the prompt."""
    model = tiny_model("llama")
    chunks = random_prompts(52, [9, 140, 12])
    with engine(model.path, max_model_len=256, enforce_eager=True) as llm:
        driver = Driver(llm)
        driver.repetition_penalty = 5.0
        session = Session("session", chunks)
        driver.open(session)
        for _ in range(3):
            driver.feed(session)
        while driver.is_open():
            driver.step()
    prompt: tuple[int, ...] = ()
    num_changed = []
    for chunk, outputs in zip(chunks, session.outputs[:-1], strict=True):
        prompt += chunk
        request = Request(prompt, SamplingParams(temperature=0, max_tokens=OUTPUTS, repetition_penalty=5.0))
        num_changed.append(check_tokens(model, request, outputs))
        prompt += tuple(outputs[:-1])
    assert min(num_changed[1:]), "the penalty makes no difference"


def test_closing_and_aborting_free_everything(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    prompts = random_prompts(50, [5, 30, 9, 12])
    with engine(model.path, max_model_len=128, enforce_eager=True) as llm:
        driver = Driver(llm)
        for name in ("closed", "aborted"):
            driver.open(Session(name, prompts[:1]))
        for _ in range(20):
            driver.step()
        assert set(driver.runner.parts.requests.infos) == {"closed", "aborted"}
        driver.feed(driver.sessions["closed"])
        driver.core.abort_requests(["aborted"])
        driver.ask("plain", prompts[1])
        while driver.is_open():
            driver.step()
        driver.check(model)
        assert set(driver.runner.parts.requests.infos) == {"plain"}
        assert driver.core.scheduler.kv_cache_manager.usage == 0


def test_prompt_logprobs_come_with_the_first_chunk_alone(tiny_model: Callable[[str], TinyModel]) -> None:
    """vLLM's front end has no place for those of later chunks, and would fail for all of its requests."""
    model = tiny_model("llama")
    with engine(model.path, max_model_len=128, enforce_eager=True) as llm:
        for first, answered in ((None, 0), (0, 1)):
            driver = Driver(llm)
            driver.prompt_logprobs = first
            driver.open(Session(f"session-{first}", random_prompts(51, [9, 6])))
            for _ in range(15):
                driver.step()
            driver.prompt_logprobs = 0
            for _ in range(2):
                driver.feed(*driver.sessions.values())
            while driver.is_open():
                driver.step()
            driver.check(model)
            assert driver.prompts_answered == answered


def test_a_dropped_output_is_in_no_prefix_cache(tiny_model: Callable[[str], TinyModel]) -> None:
    """A turn ends where a cache block would be full. The next input's first token takes the dropped output's place."""
    model = tiny_model("llama")
    chunks = random_prompts(53, [32 - OUTPUTS, 40])
    with engine(model.path, max_model_len=128, enforce_eager=True) as llm:
        assert llm.llm_engine.vllm_config.cache_config.block_size == 32
        driver = Driver(llm)
        session = Session("session", chunks)
        driver.open(session)
        driver.feed(session)
        for _ in range(30):
            driver.step()
        first, _, _ = session.outputs
        driver.ask("plain", (*chunks[0], *first, 5, 6, 7))
        driver.feed(session)
        while driver.is_open():
            driver.step()
        driver.check(model)
