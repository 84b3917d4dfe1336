"""vLLM's OpenAI server with the device, in processes of its own: answers, whole and in pieces; clients that leave."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import DEFAULTS
from model_runner_base.testing.fixtures import Serve
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.orphans import check_all_end, children_with
from model_runner_base.testing.server import gauge, pieces_of, post, posted, wait_until_idle
from model_runner_base.testing.tokenizer import make_tokenizer

PROMPTS = random_prompts(220, [9, 40, 3, 70])
COUNT = 16
MESSAGES = [{"role": "user", "content": "who is the king?"}]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
BODY: dict[str, Any] = {"model": "kit", "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
STOPPED = 200
"""Tokens that a client asks for who leaves after the first ones."""
TRIES = 8
"""Clients that may leave too late: a fast device has made all tokens by then."""


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[str]:
    with serve(chat_template=TEMPLATE) as url:
        yield url


def text_after(model: TinyModel, prompt: tuple[int, ...], count: int = COUNT) -> str:
    return make_tokenizer().decode(model.greedy(prompt, count), skip_special_tokens=True)


def complete(url: str, prompt: tuple[int, ...], **options: Any) -> dict[str, Any]:
    return post(f"{url}/v1/completions", {**BODY, "prompt": list(prompt), **options})


def test_completions(server: str, text_model: TinyModel) -> None:
    """Completions whole and in pieces, several at once, are the reference's text."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [*pool.map(lambda prompt: complete(server, prompt), PROMPTS)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer["choices"][0]["text"] == text_after(text_model, prompt), f"prompt_token_ids={list(prompt)}"
        assert answer["usage"]["completion_tokens"] == COUNT
        pieces = pieces_of(f"{server}/v1/completions", {**BODY, "prompt": list(prompt)})
        assert "".join(pieces) == text_after(text_model, prompt), f"in pieces: prompt_token_ids={list(prompt)}"
        assert len(pieces) > 3, "the text did not come in pieces"


def test_chat(server: str, text_model: TinyModel) -> None:
    """A chat, whole and in pieces, is the reference's text."""
    prompt = tuple(make_tokenizer().encode(f"{MESSAGES[0]['content']} ", add_special_tokens=False))
    want = text_after(text_model, prompt)
    body = {**BODY, "messages": MESSAGES}
    answer = post(f"{server}/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == want
    assert "".join(pieces_of(f"{server}/v1/chat/completions", body)) == want


def tokens_until_left(url: str) -> float:
    """Tokens that were made for a client that leaves after the first ones."""
    wait_until_idle(url)
    before = gauge(url, "vllm:generation_tokens_total")
    body = {**BODY, "prompt": list(PROMPTS[0]), "max_tokens": STOPPED, "stream": True}
    with posted(f"{url}/v1/completions", body) as answer:
        answer.readline()
    wait_until_idle(url)
    return gauge(url, "vllm:generation_tokens_total") - before


def test_a_client_that_leaves(server: str, text_model: TinyModel) -> None:
    """A client that disconnects in the middle of its answer frees its blocks, and others are served as before."""
    is_cut = any(0 < tokens_until_left(server) < STOPPED for _ in range(TRIES))
    assert is_cut, f"each of {TRIES} requests ran to its end"
    assert complete(server, PROMPTS[1])["choices"][0]["text"] == text_after(text_model, PROMPTS[1])


def test_a_bad_request(server: str, text_model: TinyModel) -> None:
    """A request that is too long gets status 400, and others are served as before."""
    prompt = [5] * (2 * DEFAULTS["max_model_len"])
    with pytest.raises(HTTPError) as raised:
        complete(server, tuple(prompt))
    assert raised.value.code == 400, raised.value.read().decode()
    assert complete(server, PROMPTS[2])["choices"][0]["text"] == text_after(text_model, PROMPTS[2])


def test_processes_of_a_server_that_is_killed(server: str) -> None:
    """The engine core, the workers and their helpers end with the server, so that the device is free. It comes last."""
    (process,) = children_with("model_runner_base.testing.server_process", psutil.Process())
    check_all_end(process)
