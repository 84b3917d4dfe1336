"""Requests that no honest client sends, over the real server: none has status 500, ends it, or changes the others."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from conftest import BUNDLED_MODEL
from serving import served

pytestmark = pytest.mark.newest  # The server and its checks are the same on both lanes.

SMALL = ("--max-model-len", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--enforce-eager")
INTEGERS = [0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63)]
NUMBERS = [*INTEGERS, 0.5, 1e-38, 1e38, 1e300, float("inf"), float("nan")]
TEXTS = ["", " ", "\x00", "\u00e9\U0001f600", "\ud800", "a" * 70_000]
VALUES: dict[str, list[Any]] = {
    "prompt": [[], [2**63], [-1], [5] * 127, [5] * 128, [5] * 129, [5] * 5000, *TEXTS],
    "max_tokens": INTEGERS,
    "min_tokens": INTEGERS,
    "n": [0, -1, 10**9, 2**64],
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": INTEGERS,
    "min_p": NUMBERS,
    "seed": INTEGERS,
    "presence_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "stop": [TEXTS, ["a"] * 5000, *TEXTS],
    "stop_token_ids": [[value] for value in INTEGERS],
    "logprobs": INTEGERS,
    "prompt_logprobs": INTEGERS,
    "logit_bias": [{"5": value} for value in NUMBERS] + [{"-1": 1.0}, {"x": 1.0}, {str(2**64): 1.0}],
    "allowed_token_ids": [[], [2**63], [-1], [3]],
    "bad_words": [[text] for text in TEXTS],
    "priority": INTEGERS,
    "cache_salt": TEXTS,
    "truncate_prompt_tokens": INTEGERS,
    "structured_outputs": [{"regex": "("}, {"choice": []}, {"json": "{"}, {"grammar": "root ::= root"}],
    "stream": [True],
}
ALL = [{name: value} for name, values in VALUES.items() for value in values]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(BUNDLED_MODEL, *SMALL) as url:
        yield url


def ask(server: str, fields: dict[str, Any]) -> httpx.Response:
    body = {"model": str(BUNDLED_MODEL), "prompt": "In the beginning", "max_tokens": 8, "temperature": 0} | fields
    # As a client of any language may write it: NaN, infinity and lone surrogates among it.
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server}/v1/completions", content=json.dumps(body), headers=headers, timeout=120)


def test_hostile_requests(server: str) -> None:
    """Requests with each value of each field, and with pairs of them, do no harm to honest ones."""
    (honest,) = ask(server, {}).json()["choices"]
    rng = random.Random(1)
    pairs = [rng.choice(ALL) | rng.choice(ALL) for _ in range(100)]
    batch = [*ALL, *pairs, *[{}] * 60]
    rng.shuffle(batch)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda fields: ask(server, fields), batch))
    for fields, answer in zip(batch, answers, strict=True):
        assert answer.status_code < 500, f"{str(fields)[:300]}: {answer.status_code} {answer.text[:300]}"
        if not fields:
            assert answer.json()["choices"][0]["text"] == honest["text"]
    assert sum(answer.status_code == 200 for answer in answers) > 100, "most of it never reached the engine"
    assert httpx.get(f"{server}/health").status_code == 200
