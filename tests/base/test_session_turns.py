"""Turns of streaming-input sessions: parameters of their own, and the end of a session that grows too long."""

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import engine
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.structured_output import StructuredOutputManager

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.sessions import WITHOUT_EOS
from model_runner_base.testing.tokenizer import EOS, add_tokenizer

LONGEST = 128


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return add_tokenizer(tiny_model("llama"))


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def llm(request: pytest.FixtureRequest, model: TinyModel) -> Iterator[LLM]:
    options = {"async_scheduling": request.param, "skip_tokenizer_init": False}
    with engine(model.path, max_model_len=LONGEST, max_num_seqs=4, enforce_eager=True, **options) as llm:
        yield llm


def told_of(output: EngineCoreOutput) -> Any:
    """Stop token or words that an output ends with; newer releases have a field of their own for errors."""
    error = getattr(output, "error", None)
    return error.message if error else output.stop_reason


class Client:
    """Sends requests to the engine core as AsyncLLM would."""

    def __init__(self, llm: LLM) -> None:
        self.core = core_of(llm)
        self.suffix = f"-{uuid.uuid4()}"
        """Last part of ids, unique as AsyncLLM makes it, since an id is used once."""
        self.turns: dict[str, list[list[int]]] = {}
        """Tokens of each turn, by request; the last turn is the one that comes now."""
        self.ends: dict[str, list[tuple[FinishReason, Any]]] = {}

    def send(self, name: str, tokens: tuple[int, ...], is_session: bool = True, **params: Any) -> None:
        sampling = SamplingParams(**({"temperature": 0, "max_tokens": 5, "ignore_eos": True} | params))
        if sampling.structured_outputs is not None:
            sampling.structured_outputs._backend = "xgrammar"
        sampling.update_from_generation_config({}, EOS)
        eos = {name: EOS for name in WITHOUT_EOS}
        request = EngineCoreRequest(
            request_id=name + self.suffix,
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            **eos,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=is_session,
        )
        self.turns.setdefault(name, [[]])
        self.core.add_request(*self.core.preprocess_add_request(request))

    def run(self, num_ends: dict[str, int]) -> None:
        """Runs steps until ``num_ends`` turns of each request have ended."""
        deadline = time.monotonic() + 20
        while any(len(self.ends.get(name, ())) < count for name, count in num_ends.items()):
            assert time.monotonic() < deadline, "a turn waits for ever"
            by_client, executed = self.core.step_fn()
            self.core.post_step(model_executed=executed)
            for outputs in (by_client or {}).values():
                for output in outputs.outputs:
                    name = output.request_id.removesuffix(self.suffix)
                    self.turns[name][-1].extend(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.turns[name].append([])
                        self.ends.setdefault(name, []).append((output.finish_reason, told_of(output)))

    def close(self, *names: str) -> None:
        self.core.abort_requests([name + self.suffix for name in names])
        while self.core.scheduler.has_requests():
            self.core.step_fn()
        assert not self.core.scheduler.requests


@pytest.mark.parametrize("is_queued", [True, False], ids=["queued", "idle"])
@pytest.mark.parametrize("total", [LONGEST - 1, LONGEST, LONGEST + 1, 2 * LONGEST])
def test_a_session_that_grows_too_long(llm: LLM, model: TinyModel, total: int, is_queued: bool) -> None:
    """A session has one token left just below the model's length. From there on it alone ends with an error."""
    first, other = random_prompts(80, [40, 9])
    (second,) = random_prompts(81, [total - 40 - 4])  # 5 outputs of the first turn, less the last.
    client = Client(llm)
    client.send("other", other, is_session=False, max_tokens=30)
    client.send("session", first)
    if is_queued:
        client.send("session", second)
    client.run({"session": 1})
    if not is_queued:
        client.send("session", second)
    client.run({"session": 2, "other": 1})
    kept = model.greedy(first, 5)
    assert client.turns["session"][0] == kept
    assert client.turns["other"][0] == model.greedy(other, 30)
    reason, words = client.ends["session"][1]
    if total < LONGEST:
        assert reason == FinishReason.LENGTH
        assert client.turns["session"][1] == model.greedy((*first, *kept[:-1], *second), 1)
    else:
        assert reason == FinishReason.ERROR and f"{total} tokens" in words and str(LONGEST) in words
        client.send("session", (5, 6))  # Input that was under way when the session ended.
        client.send("session", (0,), is_session=False)
    client.close("session")


@pytest.mark.parametrize("is_queued", [True, False], ids=["queued", "idle"])
def test_each_turn_has_its_own_max_tokens(llm: LLM, model: TinyModel, is_queued: bool) -> None:
    chunks, client, prompt = random_prompts(82, [9, 6, 12]), Client(llm), ()
    for turn, (chunk, count) in enumerate(zip(chunks, (3, 8, 2), strict=True)):
        client.send("session", chunk, max_tokens=count)
        if not is_queued:
            client.run({"session": turn + 1})
    client.run({"session": 3})
    for chunk, count, tokens in zip(chunks, (3, 8, 2), client.turns["session"], strict=False):
        prompt += chunk
        assert tokens == model.greedy(prompt, count)
        prompt += tuple(tokens[:-1])
    client.close("session")


@pytest.mark.parametrize("is_queued", [True, False], ids=["queued", "idle"])
def test_each_turn_has_its_own_grammar(llm: LLM, model: TinyModel, is_queued: bool) -> None:
    """An unfinished grammar binds its own turn alone. A turn's last token does not count for the next one's grammar."""
    decode = llm.get_tokenizer().decode
    grammars = [StructuredOutputsParams(regex="[0-9]{40}"), None, StructuredOutputsParams(regex="yes")]
    chunks, client, prompt = random_prompts(83, [9, 6, 12]), Client(llm), ()
    for turn, (chunk, grammar) in enumerate(zip(chunks, grammars, strict=True)):
        client.send("session", chunk, structured_outputs=grammar, ignore_eos=False, max_tokens=6)
        if not is_queued:
            client.run({"session": turn + 1})
    client.run({"session": 3})
    digits, free, choice, _ = client.turns["session"]
    assert decode(digits).isdigit() and decode(choice, skip_special_tokens=True) == "yes"
    prompt = (*chunks[0], *digits[:-1], *chunks[1])
    assert free == model.greedy(prompt, 6)
    client.close("session")


def test_a_grammar_that_takes_long_holds_up_its_turn_alone(
    llm: LLM, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow grammar holds up its own turn alone. The step after the last turn's end may still ask for a bitmask,
    which another request needs."""
    create, decode = StructuredOutputManager._create_grammar, llm.get_tokenizer().decode

    def slow(self: Any, request: Any) -> Any:
        if request.sampling_params.structured_outputs.regex == "yes":
            time.sleep(0.3)
        return create(self, request)

    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", slow)
    chunks, client = random_prompts(86, [9, 6, 7]), Client(llm)
    digits, yes = StructuredOutputsParams(regex="[0-9]{3}"), StructuredOutputsParams(regex="yes")
    other = StructuredOutputsParams(regex="[0-9]{40}")
    client.send("other", chunks[2], is_session=False, structured_outputs=other, max_tokens=20)
    client.send("session", chunks[0], structured_outputs=digits, ignore_eos=False, max_tokens=9)
    client.send("session", chunks[1], structured_outputs=yes, ignore_eos=False, max_tokens=9)
    client.run({"session": 2, "other": 1})
    first, second, _ = client.turns["session"]
    assert first[-1] == EOS and decode(first[:-1]).isdigit()
    assert decode(second, skip_special_tokens=True) == "yes"
    assert decode(client.turns["other"][0]).isdigit()
    client.close("session")


def test_a_stop_reason_ends_with_its_turn(llm: LLM, model: TinyModel) -> None:
    (chunk,), client = random_prompts(84, [9]), Client(llm)
    stop = model.greedy(chunk, 3)[2]
    client.send("session", chunk, stop_token_ids=[stop])
    client.send("session", (7, 8), max_tokens=2)
    client.run({"session": 2})
    assert client.ends["session"][0] == (FinishReason.STOP, stop)
    assert client.ends["session"][1] == (FinishReason.LENGTH, None)
    client.close("session")


def test_a_grammar_that_does_not_compile(llm: LLM, model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that vLLM's front end lets through but that does not compile ends its own request."""

    def fails(*_: Any) -> None:
        raise RuntimeError("too many states")

    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", fails)
    (prompt,), client = random_prompts(85, [9]), Client(llm)
    client.send("other", prompt, is_session=False, max_tokens=30)
    client.send("bad", prompt, is_session=False, structured_outputs=StructuredOutputsParams(regex="[0-9]"))
    client.run({"bad": 1, "other": 1})
    assert client.turns["other"][0] == model.greedy(prompt, 30)
    reason, words = client.ends["bad"][0]
    assert reason == FinishReason.ERROR and "too many states" in words
    assert not client.core.scheduler.requests
