"""Streaming-input sessions: a session's tokens are those of its prompt so far, without a session.

vLLM's rule: when the next chunk of input comes, the outputs whose keys and values were computed become part of the
prompt (all but the last), and the chunk follows them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from conftest import engine
from vllm import LLM, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import core_of, runner_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request, check_tokens

OUTPUTS = 7
WITHOUT_EOS: dict[str, Any] = {"eos_token_id": None} if "eos_token_id" in EngineCoreRequest.__struct_fields__ else {}


@dataclass
class Session:
    """A session as its user sees it: chunks of input, and the outputs that came for each."""

    name: str
    chunks: list[tuple[int, ...]]
    sent: int = 0
    prompt: tuple[int, ...] = ()
    """Prompt that vLLM makes of the session so far, by its rule."""
    outputs: list[list[int]] = field(default_factory=lambda: [[]])
    """Outputs for each chunk; the last list is of the outputs that come now."""

    def check(self, model: TinyModel, stops: Sequence[int]) -> None:
        assert self.outputs.pop() == [] and len(self.outputs) == len(self.chunks)
        for chunk, outputs in zip(self.chunks, self.outputs, strict=True):
            self.prompt += chunk
            assert outputs == until(stops, model.greedy(self.prompt, OUTPUTS)), self.name
            self.prompt += tuple(outputs[:-1])


def until(stops: Sequence[int], tokens: list[int]) -> list[int]:
    """The tokens up to the first that ends them."""
    ends = [index + 1 for index, token in enumerate(tokens) if token in stops]
    return tokens[: min(ends, default=len(tokens))]


class Driver:
    """Feeds the engine core what AsyncLLM would, at chosen steps."""

    def __init__(self, llm: LLM) -> None:
        self.core = core_of(llm)
        self.runner = runner_of(llm)
        self.prompt_logprobs: int | None = None
        self.repetition_penalty = 1.0
        self.stops: list[int] = []
        self.prompts_answered = 0
        self.sessions: dict[str, Session] = {}
        self.plain: dict[str, tuple[tuple[int, ...], list[int]]] = {}

    def send(self, name: str, tokens: tuple[int, ...], resumable: bool, priority: int = 0) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUTS,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=self.prompt_logprobs,
            repetition_penalty=self.repetition_penalty,
            stop_token_ids=self.stops,
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            **WITHOUT_EOS,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))

    def open(self, session: Session) -> None:
        self.sessions[session.name] = session
        self.feed(session)

    def feed(self, session: Session) -> None:
        """Sends the session's next chunk, or the word that it is over."""
        if session.sent < len(session.chunks):
            self.send(session.name, session.chunks[session.sent], resumable=True)
        elif session.sent == len(session.chunks):
            self.send(session.name, (0,), resumable=False)
        session.sent += 1

    def ask(self, name: str, prompt: tuple[int, ...]) -> None:
        self.plain[name] = (prompt, [])
        self.send(name, prompt, resumable=False)

    def step(self) -> None:
        by_client, executed = self.core.step_fn()
        self.core.post_step(model_executed=executed)
        for output in (by_client or {}).values():
            for one in output.outputs:
                self.prompts_answered += one.new_prompt_logprobs_tensors is not None
                if one.request_id in self.plain:
                    self.plain[one.request_id][1].extend(one.new_token_ids)
                    continue
                outputs = self.sessions[one.request_id].outputs
                outputs[-1].extend(one.new_token_ids)
                if one.finish_reason is not None:
                    outputs.append([])

    def is_open(self) -> bool:
        return bool(self.core.scheduler.requests)

    def check(self, model: TinyModel) -> None:
        for session in self.sessions.values():
            session.check(model, self.stops)
        for prompt, tokens in self.plain.values():
            assert tokens == until(self.stops, model.greedy(prompt, OUTPUTS))


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


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_preempted_sessions(is_async: bool, tiny_model: Callable[[str], TinyModel]) -> None:
    """A session is preempted in the middle of a chunk, as blocks are few, and resumes with all of its tokens."""
    model = tiny_model("llama")
    options = {"async_scheduling": is_async, "block_size": 16, "num_gpu_blocks_override": 14}
    with engine(model.path, max_model_len=160, max_num_seqs=3, enforce_eager=True, **options) as llm:
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
