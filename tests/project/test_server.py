"""The real `vllm serve` with the limits it takes by itself, against the real OpenAI client."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from conftest import BUNDLED_MODEL
from serving import served
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "And it came to pass, when the king heard"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    # As many tokens as these take longer in graphs without optimisation than compiling them.
    with served(BUNDLED_MODEL, "--served-model-name", "kjv", XLA_FLAGS="") as url:
        yield url


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def greedy_text() -> str:
    """Text with which HF transformers continues PROMPT: 24 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype="float32")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def gauge(server: str, name: str) -> float:
    lines = httpx.get(f"{server}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def wait_until_idle(server: str) -> None:
    deadline = time.monotonic() + 30
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(gauge(server, name) > 0 for name in names):
        assert time.monotonic() < deadline, {name: gauge(server, name) for name in names}
        time.sleep(0.1)


def test_completion_equals_transformers(client: openai.OpenAI, greedy_text: str) -> None:
    completion = client.completions.create(model="kjv", prompt=PROMPT, max_tokens=24, temperature=0)
    assert completion.choices[0].text == greedy_text
    assert completion.usage is not None and completion.usage.completion_tokens == 24
    assert completion.choices[0].finish_reason == "length"


def test_streaming_gives_the_same_text(client: openai.OpenAI, greedy_text: str) -> None:
    chunks = list(client.completions.create(model="kjv", prompt=PROMPT, max_tokens=24, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy_text
    assert len(chunks) > 10, "the text did not arrive piece by piece"


def test_chat_streaming_and_not(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Who is my shepherd?"}]
    options = {"model": "kjv", "messages": messages, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    pieces = client.chat.completions.create(**options, stream=True)  # type: ignore[call-overload]
    assert whole.choices[0].message.content
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content


def test_seeded_sampling_repeats(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        out = client.completions.create(
            model="kjv", prompt=PROMPT, max_tokens=24, temperature=1.0, seed=seed, top_p=0.9
        )
        return out.choices[0].text

    assert draw(7) == draw(7) != draw(8)


def test_several_choices_differ(client: openai.OpenAI) -> None:
    out = client.completions.create(model="kjv", prompt=PROMPT, max_tokens=16, temperature=1.0, n=3, seed=1)
    assert len({choice.text for choice in out.choices}) == 3


def test_log_probabilities_of_prompt_and_answer(client: openai.OpenAI) -> None:
    """Log probabilities of echoed and of sampled tokens are those of HF transformers."""
    out = client.completions.create(model="kjv", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2, echo=True)
    logprobs = out.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype="float32")
    ids = tokenizer(out.choices[0].text, return_tensors="pt").input_ids
    expected = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert logprobs.token_logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-3)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])


def test_structured_answers_among_free_ones(client: openai.OpenAI, greedy_text: str) -> None:
    """JSON by chat, a choice, and a free request, all at once."""
    # Not by schema: this model, where any white space is allowed, writes nothing else.
    form = {"structured_outputs": {"regex": r'\{"tribe": "(Levi|Judah)", "count": [1-9][0-9]\}'}}

    def chat() -> str:
        messages = [{"role": "user", "content": "Number the people."}]
        out = client.chat.completions.create(  # type: ignore[call-overload]
            model="kjv", messages=messages, max_tokens=60, temperature=1, seed=3, extra_body=form
        )
        return out.choices[0].message.content

    def choose() -> str:
        body = {"structured_outputs": {"choice": ["Moses", "Aaron"]}}
        return client.completions.create(model="kjv", prompt=PROMPT, extra_body=body).choices[0].text

    def free() -> str:
        return client.completions.create(model="kjv", prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(job) for job in (free, chat, choose, free, chat, choose)]
    texts = [answer.result() for answer in answers]
    assert texts[0] == texts[3] == greedy_text
    for text in (texts[1], texts[4]):
        census = json.loads(text)
        assert census["tribe"] in ("Levi", "Judah") and census["count"] <= 99
    assert {texts[2], texts[5]} <= {"Moses", "Aaron"}


def test_disconnect_frees_the_blocks(server: str, client: openai.OpenAI, greedy_text: str) -> None:
    wait_until_idle(server)
    before = gauge(server, "vllm:generation_tokens_total")
    stream = client.completions.create(
        model="kjv", prompt=PROMPT, max_tokens=900, temperature=1.0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until_idle(server)
    assert gauge(server, "vllm:generation_tokens_total") - before < 900, "it was served to its end"
    test_completion_equals_transformers(client, greedy_text)


def test_concurrent_requests_keep_their_tokens(server: str, client: openai.OpenAI) -> None:
    """64 at once, of different lengths, each the same as alone."""
    prompts = [f"{PROMPT} of the {number} words," for number in range(64)]

    def complete(index: int) -> str:
        out = client.completions.create(model="kjv", prompt=prompts[index], max_tokens=5 + index % 20, temperature=0)
        return out.choices[0].text

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(complete, range(64)))
    assert together == [complete(index) for index in range(64)]
    wait_until_idle(server)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "word " * 2000}, "context length is (only )?1024"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature"),
        ({"prompt": PROMPT, "max_tokens": -5}, "max_tokens"),
        ({"prompt": PROMPT, "presence_penalty": 5.0}, "presence_penalty"),
        ({"prompt": PROMPT, "logprobs": 50}, "logprobs"),
        ({"prompt": PROMPT, "structured_outputs": {"regex": "["}}, ""),
        ({"prompt": [5, 99999]}, "out of vocabulary"),
        ({"prompt": []}, ""),
        ({"prompt": PROMPT, "top_p": 2.0}, "top_p"),
    ],
)
def test_bad_requests_get_400(server: str, client: openai.OpenAI, greedy_text: str, body: dict, message: str) -> None:
    answer = httpx.post(f"{server}/v1/completions", json={"model": "kjv", **body})
    assert 400 <= answer.status_code < 500 and re.search(message, answer.text), answer.text
    test_completion_equals_transformers(client, greedy_text)


def test_unknown_model_gets_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=PROMPT)
