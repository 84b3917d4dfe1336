"""Hostile sessions, adapters and embeddings among honest ones, with aborts and resets at any step.

The kit's row and ``test_hostile_server.py`` send what one request may say; these tests send what comes with a request.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from test_prompt_embeds import embeddings
from test_session_turns import Client
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason

from model_runner_base.testing.adapters import TinyAdapter, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, core_of, greedy
from model_runner_base.testing.leftovers import check_nothing_left, count_infos
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.tokenizer import add_tokenizer

LONGEST, WIDTH, NUM_ROUNDS, SECONDS = 128, 64, 60, 20
PLAIN, ADAPTED, FIRST, SECOND = random_prompts(95, [30, 12, 20, 9])
COUNT = 10

# A session: its turns, whether they are queued at once, and whether the client goes away.
turns = st.tuples(
    st.sampled_from([1, 3, 40, LONGEST - 1, LONGEST, LONGEST + 1, 300]),
    st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.sampled_from([1, 5, 2**31]),
            "min_tokens": st.sampled_from([1, 3, 2**31]),
            "structured_outputs": st.sampled_from(["[0-9]{40}", "yes", "("]),
            "allowed_token_ids": st.just([20]),
        },
    ),
)
sessions = st.tuples(st.lists(turns, min_size=1, max_size=3), st.booleans(), st.booleans())
ADAPTERS: dict[str, Callable[[TinyAdapter, TinyAdapter], LoRARequest]] = {
    "another": lambda good, other: other.request,
    "id taken": lambda good, other: LoRARequest("x", good.number, str(other.path)),
    "name taken": lambda good, other: LoRARequest(good.name, 7, str(other.path)),
    "nowhere": lambda good, other: LoRARequest("nowhere", 8, str(other.path / "nowhere")),
    "huge id": lambda good, other: LoRARequest("huge", 2**63, str(other.path)),
    "no adapter": lambda good, other: LoRARequest("model", 9, str(good.model)),
}
EMBEDDINGS: dict[str, Callable[[], Any]] = {
    "right": lambda: torch.randn(9, WIDTH),
    "too wide": lambda: torch.randn(9, WIDTH + 1),
    "flat": lambda: torch.randn(WIDTH),
    "none": lambda: torch.zeros(0, WIDTH),
    "as long as it may be": lambda: torch.randn(LONGEST - 1, WIDTH),
    "too long": lambda: torch.randn(LONGEST, WIDTH),
    "not numbers": lambda: torch.full((5, WIDTH), torch.nan),
    "infinite": lambda: torch.full((5, WIDTH), torch.inf),
    "integers": lambda: torch.ones(5, WIDTH, dtype=torch.int64),
    "doubles": lambda: torch.randn(5, WIDTH, dtype=torch.float64),
    "text": lambda: "embeddings",
}
rounds = st.fixed_dictionaries(
    {
        "sessions": st.lists(sessions, max_size=2),
        "adapters": st.lists(st.sampled_from(sorted(ADAPTERS)), max_size=2),
        "embeddings": st.lists(st.sampled_from(sorted(EMBEDDINGS)), max_size=2),
        "is_queued": st.booleans(),  # The honest session's second turn.
        "resets": st.sets(st.integers(0, 12), max_size=2),
        "aborts": st.dictionaries(st.integers(0, 12), st.integers(0, 3), max_size=2),
    }
)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return add_tokenizer(tiny_model("llama"))


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def llm(request: pytest.FixtureRequest, model: TinyModel) -> Iterator[LLM]:
    """An engine of five rows, and of fewer blocks than all of them may need."""
    options: dict[str, Any] = {"async_scheduling": request.param, "skip_tokenizer_init": False, "enforce_eager": True}
    options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_prompt_embeds": True}
    options |= {"max_model_len": LONGEST, "max_num_seqs": 5, "max_num_batched_tokens": 64}
    with engine(model.path, kv_cache_memory_bytes=cache_bytes(model.path, 320), **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def adapters(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> list[TinyAdapter]:
    directory: Path = tmp_path_factory.mktemp("adapters")
    return [make_adapter(model.path, directory, number, rank=4) for number in (1, 2)]


class Round:
    """Clients of one engine: requests through its front end, and sessions as ``AsyncLLM`` sends them."""

    def __init__(self, llm: LLM, is_queued: bool) -> None:
        self.engine, self.is_queued = llm.llm_engine, is_queued
        self.client = Client(llm)
        self.llm = llm
        self.done: dict[str, Any] = {}
        self.waiting: dict[str, list[Any]] = {"session": [] if is_queued else [SECOND]}
        """Turns that are sent once the last has ended."""
        self.gone: set[str] = set()
        self.num_turns = {"session": 2}

    def send(self, name: str, prompt: Any, adapter: LoRARequest | None = None) -> bool:
        """Sends a request; returns whether it was queued. A refusal may be any error."""
        num_before = self.engine.get_num_unfinished_requests()
        try:
            self.engine.add_request(name, prompt, greedy(COUNT), lora_request=adapter)
        except Exception:
            assert self.engine.get_num_unfinished_requests() == num_before, f"{name} was refused, and is queued"
            return False
        return True

    def turn(self, name: str, length: int, fields: dict[str, Any]) -> None:
        fields = dict(fields)
        if regex := fields.pop("structured_outputs", None):
            fields["structured_outputs"] = StructuredOutputsParams(regex=regex)
        if "min_tokens" in fields:  # The front end has made it so.
            fields["min_tokens"] = min(fields["min_tokens"], fields.get("max_tokens", 5))
        self.client.send(name, random_prompts(length, [length])[0], **fields)

    def step(self) -> None:
        by_client, executed = self.client.core.step_fn()
        self.client.core.post_step(model_executed=executed)
        for outputs in (by_client or {}).values():
            for output in self.engine.output_processor.process_outputs(outputs.outputs).request_outputs:
                self.done[output.request_id] = output.outputs[0]
            for output in outputs.outputs:
                self._note(output)

    def _note(self, output: Any) -> None:
        name = output.request_id.removesuffix(self.client.suffix)
        if name not in self.client.turns:
            return
        self.client.turns[name][-1].extend(output.new_token_ids)
        if output.finish_reason is None:
            return
        self.client.turns[name].append([])
        if output.finish_reason == FinishReason.ERROR:
            self.gone.add(name)
        elif self.waiting.get(name):
            following = self.waiting[name].pop(0)
            if name == "session":
                self.client.send(name, following, max_tokens=COUNT)
            else:
                self.turn(name, *following)

    def is_over(self) -> bool:
        turns = self.client.turns
        names = [name for name in turns if name not in self.gone]
        return not self.engine.has_unfinished_requests() and all(
            len(turns[name]) > self.num_turns.get(name, 1) for name in names
        )


def play(llm: LLM, drawn: dict[str, Any], good: TinyAdapter, other: TinyAdapter) -> Round:
    at = Round(llm, drawn["is_queued"])
    assert at.send("plain", {"prompt_token_ids": list(PLAIN)})
    assert at.send("adapted", {"prompt_token_ids": list(ADAPTED)}, good.request)
    at.client.send("session", FIRST, max_tokens=COUNT)
    if at.is_queued:
        at.client.send("session", SECOND, max_tokens=COUNT)
    hostile = []
    for index, name in enumerate(drawn["adapters"]):
        if at.send(f"adapter {index}", {"prompt_token_ids": list(ADAPTED)}, ADAPTERS[name](good, other)):
            hostile.append(f"adapter {index}")
    for index, name in enumerate(drawn["embeddings"]):
        if at.send(f"embeddings {index}", {"prompt_embeds": EMBEDDINGS[name]()}):
            hostile.append(f"embeddings {index}")
    for index, (chunks, is_queued, _) in enumerate(drawn["sessions"]):
        name = f"hostile {index}"
        at.num_turns[name] = len(chunks)
        at.turn(name, *chunks[0])
        for chunk in chunks[1:]:
            if is_queued:
                at.turn(name, *chunk)
            else:
                at.waiting.setdefault(name, []).append(chunk)
    deadline, step = time.monotonic() + SECONDS, 0
    while not at.is_over():
        assert time.monotonic() < deadline, f"something waits for ever: {drawn}"
        if step in drawn["resets"]:
            llm.reset_prefix_cache(reset_running_requests=True)
        if (index := drawn["aborts"].get(step)) is not None and index < len(hostile):
            at.engine.abort_request([hostile[index]])
        for index, (_, _, goes_away) in enumerate(drawn["sessions"]):
            if goes_away and step == 3 + index:
                at.client.core.abort_requests([f"hostile {index}{at.client.suffix}"])
                at.gone.add(f"hostile {index}")
        at.step()
        step += 1
    return at


@pytest.mark.parametrize("is_reset", [False, True], ids=["blocks", "reset"])
def test_sessions_that_wait_for_input_hold_up_none(llm: LLM, model: TinyModel, is_reset: bool) -> None:
    """A request is served while waiting sessions hold all rows and blocks. When the sessions go on, they compute
    again what they gave up."""
    prompts, client = random_prompts(96, [90, 91, 92, 3, 4]), Client(llm)
    for index, prompt in enumerate(prompts):
        client.send(f"session {index}", prompt)
        client.run({f"session {index}": 1})
    if is_reset:
        assert llm.reset_prefix_cache(reset_running_requests=True)
    client.send("other", PLAIN, is_session=False, max_tokens=COUNT)
    client.run({"other": 1})
    assert client.turns["other"][0] == model.greedy(PLAIN, COUNT)
    for index, prompt in enumerate(prompts):
        client.send(f"session {index}", SECOND)
        client.run({f"session {index}": 2})
        first, second, _ = client.turns[f"session {index}"]
        assert first == model.greedy(prompt, 5)
        assert second == model.greedy((*prompt, *first[:-1], *SECOND), 5)
    client.close(*client.turns)


def test_hostile_sessions_adapters_and_embeddings(llm: LLM, model: TinyModel, adapters: list[TinyAdapter]) -> None:
    good, other = adapters
    num_infos = count_infos()
    first = model.greedy(FIRST, COUNT)
    right = {
        "plain": model.greedy(PLAIN, COUNT),
        "adapted": good.merged.greedy(ADAPTED, COUNT),
        "session": [first, model.greedy((*FIRST, *first[:-1], *SECOND), COUNT)],
    }

    @seed(1)
    @settings(
        max_examples=NUM_ROUNDS,
        deadline=None,
        database=None,
        phases=set(Phase) - {Phase.shrink},
        suppress_health_check=list(HealthCheck),
    )
    @given(rounds)
    def check(drawn: dict[str, Any]) -> None:
        at = play(llm, drawn, good, other)
        for name in ("plain", "adapted"):
            assert list(at.done[name].token_ids) == right[name], f"{name} beside {drawn}"
        assert at.client.turns["session"][:2] == right["session"], f"beside {drawn}"
        at.client.close(*at.client.turns)
        assert not at.engine.output_processor.request_states

    check()
    llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=3), use_tqdm=False)
    check_nothing_left(llm, "hostile ", num_infos, known=1)
    assert not core_of(llm).scheduler.requests
    assert embeddings(model, [PLAIN])[0].shape[1] == WIDTH
