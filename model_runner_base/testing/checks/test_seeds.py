"""A seed's tokens are its own: the same alone, in any batch, on any row, chunked, cached or preempted."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing import mismatch
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import check_preempted, generate, greedy, metric, sampled, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request, check_tokens

Start = Callable[..., LLM]


def seeded_requests() -> list[Request]:
    """Eight requests whose parameters differ in everything."""
    return [
        Request(
            prompt,
            sampled(
                24,
                temperature=0.5 + i / 10,
                top_p=[1.0, 0.9][i % 2],
                top_k=[0, 20, 0][i % 3],
                min_p=[0.0, 0.0, 0.05][i % 3],
                seed=i * 1_000_003,
            ),
        )
        for i, prompt in enumerate(random_prompts(70, range(10, 90, 10)))
    ]


def tokens(llm: LLM, requests: list[Request]) -> list[list[int]]:
    return tokens_of(generate(llm, [r.prompt for r in requests], [r.params for r in requests]))


def check_same(got: list[list[int]], alone: list[list[int]], requests: list[Request]) -> None:
    names = [f"{request}, compared with the request alone" for request in requests]
    mismatch.check_same(got, alone, names, [request.prompt for request in requests])


@pytest.fixture
def alone(text_engine: Start, text_model: TinyModel) -> list[list[int]]:
    """The tokens of each request on its own."""
    requests = seeded_requests()
    result = [tokens(text_engine(), [request])[0] for request in requests]
    for request, output in zip(requests, result, strict=True):
        check_tokens(text_model, request, output)
    for number, output in enumerate(result):
        first = result.index(output)
        assert first == number, f"{requests[number]}: the tokens of {requests[first]}, though the seeds differ"
    return result


def test_repeated(alone: list[list[int]], text_engine: Start) -> None:
    """The same request again, its prompt now cached, has the same tokens."""
    llm, requests = text_engine(), seeded_requests()
    for _ in range(2):
        check_same([tokens(llm, [request])[0] for request in requests], alone, requests)


def test_in_a_batch(alone: list[list[int]], text_engine: Start) -> None:
    """A seeded request has the same tokens in a batch, where its prompt is cut at other places."""
    check_same(tokens(text_engine(), seeded_requests()), alone, seeded_requests())


def test_on_another_row(alone: list[list[int]], text_engine: Start) -> None:
    """A seeded request has the same tokens in another order, hence on another row."""
    check_same(tokens(text_engine(), seeded_requests()[::-1])[::-1], alone, seeded_requests())


def test_preempted(alone: list[list[int]], text_engine: Start) -> None:
    """A seeded request has the same tokens among long requests, for which it is preempted."""
    llm, requests = text_engine(), seeded_requests()
    before = metric(llm, "vllm:num_preemptions")
    strangers = [Request(prompt, greedy(70)) for prompt in random_prompts(71, [90, 90, 90])]
    order = [*requests[6:], *strangers, *requests[:6]]
    got = tokens(llm, order)
    check_same([*got[5:], *got[:2]], alone, requests)
    check_preempted(llm, before)


def test_without_seed(text_engine: Start) -> None:
    """Requests without a seed differ from each other."""
    (prompt,) = random_prompts(72, [5])
    results = tokens(text_engine(), [Request(prompt, sampled(20))] * 6)
    for number, tokens_of_one in enumerate(results):
        first = results.index(tokens_of_one)
        assert first == number, f"request {number} of 6 without a seed has the tokens of request {first}"


def test_each_bit(text_engine: Start) -> None:
    """Seeds that differ in one bit, any of their 64, draw other tokens."""
    (prompt,) = random_prompts(74, [5])
    seeds = [0, *(1 << bit for bit in range(63)), -(1 << 63)]
    results = tokens(text_engine(), [Request(prompt, sampled(12, temperature=2.0, seed=seed)) for seed in seeds])
    for number, output in enumerate(results):
        first = results.index(output)
        assert first == number, f"seed {seeds[number]} has the tokens of seed {seeds[first]}: its bits are not all read"
