"""vLLM's OpenAI server with the device, in processes of its own: answers, whole and in pieces; clients that leave."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import pytest

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import DEFAULTS, Engines
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.server import flags, gauge, pieces_of, post, posted, served, wait_until_idle
from model_runner_base.testing.tokenizer import make_tokenizer

PROMPTS = random_prompts(220, [9, 40, 3, 70])
COUNT = 16
MESSAGES = [{"role": "user", "content": "who is the king?"}]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
BODY: dict[str, Any] = {"model": "kit", "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
STOPPED = 200
"""Tokens that a client asks for who leaves after the first ones."""


@pytest.fixture(scope="module")
def server(
    engines: Engines, text_model: TinyModel, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    engines.close()  # The device may serve one process at a time.
    option = pytestconfig.getoption
    options = DEFAULTS | {"worker_cls": option("worker"), "enforce_eager": option("eager")} | option("engine_options")
    options |= {"skip_tokenizer_init": False, "served_model_name": "kit", "chat_template": TEMPLATE}
    del options["disable_log_stats"]  # A server's default; its flag only sets it.
    log = tmp_path_factory.mktemp("server") / "log"
    with served(text_model.path, option("platform"), log, *flags(options)) as url:
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


def test_a_client_that_leaves(server: str, text_model: TinyModel) -> None:
    """A client that disconnects in the middle of its answer frees its blocks, and others are served as before."""
    wait_until_idle(server)
    before = gauge(server, "vllm:generation_tokens_total")
    body = {**BODY, "prompt": list(PROMPTS[0]), "max_tokens": STOPPED, "stream": True}
    with posted(f"{server}/v1/completions", body) as answer:
        answer.readline()
    wait_until_idle(server)
    num_tokens = gauge(server, "vllm:generation_tokens_total") - before
    assert num_tokens < STOPPED, "the request ran to its end"
    assert complete(server, PROMPTS[1])["choices"][0]["text"] == text_after(text_model, PROMPTS[1])


def test_a_bad_request(server: str, text_model: TinyModel) -> None:
    """A request that is too long gets status 400, and others are served as before."""
    prompt = [5] * (2 * DEFAULTS["max_model_len"])
    with pytest.raises(HTTPError) as raised:
        complete(server, tuple(prompt))
    assert raised.value.code == 400, raised.value.read().decode()
    assert complete(server, PROMPTS[2])["choices"][0]["text"] == text_after(text_model, PROMPTS[2])
