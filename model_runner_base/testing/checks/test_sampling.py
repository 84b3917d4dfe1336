"""Sampling parameters, each against its documented rule, as a user sees it, among requests that do not set it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from model_runner_base.testing.cases import prompt_followed_by, random_prompts
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.engine import check_preempted, generate, greedy, metric, sampled, tokens_of
from model_runner_base.testing.mismatch import check_same
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request, best_tokens, check_tokens, logits_after
from model_runner_base.testing.tokenizer import EOS, make_tokenizer

Start = Callable[..., LLM]


@pytest.fixture
def check(text_engine: Start, text_model: TinyModel) -> Callable[..., int]:
    """Runs prompts with parameters; returns at how many tokens these mattered."""

    def check(params: SamplingParams, lengths: Sequence[int] = (4, 40)) -> int:
        requests = [Request(prompt, params) for prompt in random_prompts(len(lengths), lengths)]
        return check_completions(text_engine(), text_model, requests)

    return check


@pytest.mark.parametrize("value", [2.0, 0.5, -0.5, -2.0])
def test_presence_penalty(value: float, check: Callable[..., int]) -> None:
    assert check(greedy(30, presence_penalty=value)), "the penalty changed nothing"


@pytest.mark.parametrize("value", [2.0, 0.5, -0.5, -2.0])
def test_frequency_penalty(value: float, check: Callable[..., int]) -> None:
    assert check(greedy(30, frequency_penalty=value)), "the penalty changed nothing"


@pytest.mark.parametrize("value", [1.5, 1.1, 0.8])
def test_repetition_penalty(value: float, check: Callable[..., int]) -> None:
    """repetition_penalty counts prompt and output, and pushes negative logits down."""
    assert check(greedy(30, repetition_penalty=value)), "the penalty changed nothing"


@pytest.mark.parametrize("length", [70, 150])
def test_penalty_of_a_chunked_prompt(length: int, check: Callable[..., int]) -> None:
    """repetition_penalty counts the whole of a prompt longer than a step."""
    assert check(greedy(20, repetition_penalty=2.0), [length]), "the penalty changed nothing"


@pytest.mark.parametrize(("presence", "frequency", "repetition"), [(2.0, 1.0, 0.6), (-1.0, 1.5, 1.8), (0.7, -0.4, 1.3)])
def test_penalties_together(presence: float, frequency: float, repetition: float, check: Callable[..., int]) -> None:
    """The three penalties at once, in vLLM's order."""
    params = greedy(40, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    assert check(params), "the penalties changed nothing"


def test_rules_after_preemption(text_engine: Start, text_model: TinyModel) -> None:
    """Penalties, bad words and min_tokens count all output after preemption and resume."""
    params = greedy(
        80, presence_penalty=-0.5, frequency_penalty=0.7, repetition_penalty=1.2, bad_words=["an", "ing"], min_tokens=70
    )
    llm = text_engine()
    before = metric(llm, "vllm:num_preemptions")
    requests = [Request(prompt, params) for prompt in random_prompts(3, [60, 70, 80, 90])]
    check_completions(llm, text_model, requests, bystanders=0)
    check_preempted(llm, before)


@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_min_tokens_and_stop_token_ids(num_tokens: int, text_engine: Start, text_model: TinyModel) -> None:
    """min_tokens keeps stop_token_ids out of exactly the first tokens, and they end the request after."""
    (prompt,) = random_prompts(5, [9])
    stops = stops_around(text_model, prompt, num_tokens)
    request = Request(prompt, SamplingParams(temperature=0, max_tokens=40, min_tokens=num_tokens, stop_token_ids=stops))
    assert check_completions(text_engine(), text_model, [request])


def stops_around(model: TinyModel, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Stop tokens of which one would come just before ``num_tokens``, and one comes just after."""
    stops: list[int] = []
    while True:
        request = Request(prompt, greedy(num_tokens + 1, min_tokens=num_tokens, stop_token_ids=list(stops)))
        output = best_tokens(model, request, num_tokens + 1)
        before = int(logits_after(model, [*prompt, *output])[len(prompt) + num_tokens - 2].argmax())
        missing = {before, output[-1]} - set(stops)
        if not missing:
            return stops
        stops.extend(missing)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_min_tokens_and_eos(num_tokens: int, text_engine: Start, text_model: TinyModel) -> None:
    """min_tokens keeps end-of-sequence out of the first tokens."""
    prompt = prompt_followed_by(text_model, EOS)
    request = Request(prompt, SamplingParams(temperature=0, max_tokens=10, min_tokens=num_tokens))
    assert check_completions(text_engine(), text_model, [request])


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_of_sequence(ignore_eos: bool, text_engine: Start, text_model: TinyModel) -> None:
    """End-of-sequence ends a request, unless ignore_eos."""
    prompt = prompt_followed_by(text_model, EOS)
    request = Request(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=ignore_eos))
    check_completions(text_engine(), text_model, [request])
    (tokens,) = tokens_of(generate(text_engine(), [prompt], request.params))
    assert tokens[0] == EOS and len(tokens) == (6 if ignore_eos else 1)


@pytest.mark.parametrize("place", [0, 1, 12])
def test_stop_token_ids(place: int, text_engine: Start, text_model: TinyModel) -> None:
    """stop_token_ids end a request; the token is kept and named as the reason."""
    (prompt,) = random_prompts(7, [11])
    stop = text_model.greedy(prompt, 20)[place]
    request = Request(prompt, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[511, stop]))
    check_completions(text_engine(), text_model, [request])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("place", [0, 1, 8])
def test_stop_strings(place: int, include: bool, text_engine: Start, text_model: TinyModel) -> None:
    """stop strings end the text before them, or after with include_stop_str_in_output."""
    (prompt,) = random_prompts(8, [6])
    tokenizer = make_tokenizer()
    full = tokenizer.decode(text_model.greedy(prompt, 20))
    # Across the border of two tokens.
    begin = len(tokenizer.decode(text_model.greedy(prompt, 20)[: place + 1])) - 1
    stop = full[begin : begin + 3]
    params = SamplingParams(temperature=0, max_tokens=20, stop=[stop, "@@"], include_stop_str_in_output=include)
    (output,) = generate(text_engine(), [prompt], params)
    completion = output.outputs[0]
    want = full[: full.index(stop) + (len(stop) if include else 0)]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (want, "stop", stop), (
        f"{Request(prompt, params)}: text {completion.text!r} ({completion.finish_reason}) instead of {want!r}"
    )
    check_tokens(text_model, Request(prompt, params), completion.token_ids)


@pytest.mark.parametrize("bias", [{7: 100.0}, {7: 4.0, 300: 5.0, 511: 5.5}, dict.fromkeys(range(3, 509), -100.0)])
def test_logit_bias(bias: dict[int, float], check: Callable[..., int]) -> None:
    assert check(greedy(12, logit_bias=bias)), "the bias changed nothing"


@pytest.mark.parametrize("allowed", [[9], [511, 4, 99], list(range(50, 300))], ids=["one", "three", "many"])
def test_allowed_token_ids(allowed: list[int], check: Callable[..., int]) -> None:
    assert check(greedy(12, allowed_token_ids=allowed)), "the list changed nothing"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bad_words(length: int, text_engine: Start, text_model: TinyModel) -> None:
    """bad_words of one, two and three tokens are never completed."""
    tokenizer = make_tokenizer()
    (prompt,) = random_prompts(9, [8])
    tokens = text_model.greedy(prompt, 40)
    pieces = [tokens[i : i + length] for i in range(40 - length)]
    words = [tokenizer.decode(piece) for piece in pieces]
    exact = [w for w, piece in zip(words, pieces, strict=True) if w[0] != " " and tokenizer.encode(w) == piece]
    request = Request(prompt, greedy(30, bad_words=exact[:2]))
    assert check_completions(text_engine(), text_model, [request]), "no bad word would have come"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.2},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.3},
        {"temperature": 1.5, "min_p": 0.3},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.7, "min_p": 0.05},
    ],
    ids=str,
)
def test_kept_tokens(options: dict[str, float], check: Callable[..., int]) -> None:
    """temperature, top_k, top_p and min_p never let an excluded token through."""
    check(sampled(60, seed=1, **options), [3, 30, 30, 90])


def test_rules_before_drawing(check: Callable[..., int]) -> None:
    """Penalties, bias and allowed tokens apply before a token is drawn."""
    params = sampled(
        40,
        presence_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias={7: 3.0, 8: -100.0},
        allowed_token_ids=list(range(3, 40)),
        temperature=0.9,
        top_k=6,
        seed=5,
    )
    assert check(params), "the parameters changed nothing"


AT_TEMPERATURE_0: list[dict[str, Any]] = [
    {"top_k": 2},
    {"top_p": 0.1},
    {"min_p": 0.9},
    {"seed": 3},
    {"logprobs": 2},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 2.0},
    {"logit_bias": {7: 6.0}},
    {"allowed_token_ids": list(range(50, 90))},
    {"bad_words": list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")},
    {"min_tokens": 15, "stop_token_ids": list(range(3, 100)), "ignore_eos": False},
]


@pytest.mark.parametrize("options", AT_TEMPERATURE_0, ids=lambda options: next(iter(options)))
def test_each_parameter_at_temperature_0(options: dict[str, Any], text_engine: Start, text_model: TinyModel) -> None:
    """Batches of greedy requests, with a parameter each: rules apply, and cut-offs and seeds change nothing."""
    requests = [Request(prompt, greedy(16, **options)) for prompt in random_prompts(12, [5, 40, 9])]
    changed = check_completions(text_engine(), text_model, requests, bystanders=0)
    is_rule = not options.keys() & {"top_k", "top_p", "min_p", "seed", "logprobs"}
    assert bool(changed) == is_rule, f"{options}: {changed} tokens are not those without it"


def test_n_completions(text_engine: Start, text_model: TinyModel) -> None:
    """n > 1 gives as many completions, each by the rules, and the same ones again with a seed."""
    (prompt,) = random_prompts(11, [70])
    params = sampled(20, n=4, temperature=1.0, top_k=20, seed=3)
    first, again = (generate(text_engine(), [prompt], params)[0].outputs for _ in range(2))
    for completion in first:
        check_tokens(text_model, Request(prompt, params), completion.token_ids)
    tokens = [tuple(completion.token_ids) for completion in first]
    for number, own in enumerate(tokens):
        assert own not in tokens[:number], (
            f"{Request(prompt, params)}: completion {number} has the tokens of completion {tokens.index(own)}, so both "
            "were drawn with the same noise"
        )
    names = [f"{Request(prompt, params)}, the second time: completion {number}" for number in range(4)]
    check_same([c.token_ids for c in again], [c.token_ids for c in first], names, [prompt] * 4)
