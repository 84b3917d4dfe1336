"""Compares the log-probabilities that a user gets with the reference's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import LLM, CompletionOutput, RequestOutput
from vllm.logprobs import Logprob

from model_runner_base.heads.sampling.logprobs import PROMPTS_TAKE_MODE
from model_runner_base.testing import rules
from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.engine import generate
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.reference import Request, check_tokens, logits_after
from model_runner_base.testing.tokenizer import make_tokenizer

TOLERANCE = 2e-4
"""Largest error of a log-probability or a logit in float32."""

RULES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.5},
    {"temperature": 0, "logit_bias": {9: 5.0}, "min_tokens": 4, "stop_token_ids": list(range(50, 90))},
    {"temperature": 0, "allowed_token_ids": list(range(40, 60))},
    {"temperature": 0.5, "seed": 1},
    {"temperature": 1.5, "seed": 2, "top_k": 4},
    {"temperature": 1.5, "seed": 3, "top_p": 0.5, "min_p": 0.05, "frequency_penalty": 0.5},
]
"""Parameters that change the logits that a token is taken from."""


def expected_values(model: TinyModel, request: Request, tokens: Sequence[int], mode: str) -> np.ndarray:
    """Values [len(tokens), V] float64 that ``logprobs_mode`` promises for each output token. A grammar applies first,
    in all modes."""
    raw = logits_after(model, [*request.prompt, *tokens])[len(request.prompt) - 1 : -1].astype(np.float64)
    if request.grammar is not None:
        raw = np.array([np.where(request.grammar(list(tokens[:i])), row, -np.inf) for i, row in enumerate(raw)])
    if mode.startswith("processed"):
        rows = [request.truncated(request.processed(row, tokens[:i])) for i, row in enumerate(raw)]
        raw = np.array(rows).reshape(len(tokens), VOCAB_SIZE)
    return rules.log_softmax(raw) if mode.endswith("logprobs") else raw


def check_all(llm: LLM, model: TinyModel, requests: list[Request], mode: str = "raw_logprobs") -> None:
    """Runs the requests in one batch and checks every log-probability that they ask for."""
    outputs = generate(llm, [request.prompt for request in requests], [request.params for request in requests])
    for request, output in zip(requests, outputs, strict=True):
        for completion in output.outputs:
            check_tokens(model, request, completion.token_ids)
            if request.params.logprobs is None:
                assert completion.logprobs is None, f"{request}: logprobs that were not asked for"
            else:
                check_logprobs(model, request, completion, mode)
        if request.params.prompt_logprobs is None:
            assert output.prompt_logprobs is None, f"{request}: prompt logprobs that were not asked for"
        else:
            check_prompt_logprobs(model, request, output, mode if PROMPTS_TAKE_MODE else "raw_logprobs")


def check_logprobs(model: TinyModel, request: Request, completion: CompletionOutput, mode: str) -> None:
    """Checks values, order, ranks and texts of a completion's logprobs, and their sum."""
    tokens = list(completion.token_ids)
    if request.cuts_off and mode.startswith("processed") and not PRECISION.is_exact:
        return  # Which tokens are cut off depends on rounding.
    want = expected_values(model, request, tokens, mode)
    tolerances = model.tolerances([*request.prompt, *tokens], TOLERANCE)[len(request.prompt) - 1 : -1]
    tolerances = tolerances * (request.stretch if mode.startswith("processed") else 1.0)
    entries = completion.logprobs
    assert entries is not None and len(entries) == len(tokens), f"{request}: {entries and len(entries)} logprobs"
    count = request.params.logprobs
    assert count is not None
    for i, token in enumerate(tokens):
        check_entry(entries[i], want[i], token, count, f"{request}: logprobs of token {i}", tolerances[i])
    total = sum(want[i, token] for i, token in enumerate(tokens))
    assert completion.cumulative_logprob is not None
    assert abs(completion.cumulative_logprob - total) <= sum(tolerances), (
        f"{request}: cumulative_logprob is {completion.cumulative_logprob}, the sum is {total}"
    )


def check_prompt_logprobs(
    model: TinyModel, request: Request, output: RequestOutput, mode: str = "raw_logprobs"
) -> None:
    """Checks that there is one entry for each prompt token, but none for the first."""
    entries = output.prompt_logprobs
    prompt = list(request.prompt)
    assert entries is not None and len(entries) == len(prompt), f"{request}: {entries and len(entries)} prompt logprobs"
    assert not entries[0], f"{request}: the first prompt token has logprobs: {entries[0]}"
    want = logits_after(model, prompt).astype(np.float64)
    if mode.endswith("logprobs"):
        want = rules.log_softmax(want)
    count, tolerances = request.params.prompt_logprobs, model.tolerances(prompt, TOLERANCE)
    assert count is not None
    for i in range(1, len(prompt)):
        entry = entries[i]
        assert entry is not None, f"{request}: prompt token {i} has no logprobs"
        check_entry(entry, want[i - 1], prompt[i], count, f"{request}: logprobs of prompt token {i}", tolerances[i - 1])


def check_values(model: TinyModel, prompt: Sequence[int], output: RequestOutput, where: str) -> None:
    """Checks the raw log probabilities of a prompt's tokens and of its greedy output alone: no ranks, no texts.

    The request asks for ``logprobs=0`` and ``prompt_logprobs=0``.
    """
    tokens, (completion,) = list(output.outputs[0].token_ids), output.outputs
    entries: list[Any] = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
    ids = [*prompt, *tokens]
    want, tolerances = rules.log_softmax(logits_after(model, ids)), model.tolerances(ids, TOLERANCE)
    for index, (entry, row, token) in enumerate(zip(entries, want, ids[1:], strict=False), start=1):
        got = entry[token].logprob
        PRECISION.note(1, 1)
        assert _close(got, row[token], tolerances[index - 1]), (
            f"{where}, prompt of {len(prompt)} tokens: the log probability of token {index} is {got:.4f}, and the "
            f"reference's {row[token]:.4f}"
        )


def check_entry(
    entry: dict[int, Logprob], want: np.ndarray, token: int, count: int, place: str, tolerance: float = TOLERANCE
) -> None:
    """Checks that an entry has the token first, then the ``count`` most likely in order (-1: all), no token twice."""
    PRECISION.note(1, 1)
    count = VOCAB_SIZE if count == -1 else count
    ids = list(entry)
    got = np.array([entry[i].logprob for i in ids])
    assert token in entry, f"{place}: the token {token} is not among them: {ids}"
    low, high = rules.rank(want, token, tolerance)
    sizes = {count + (rank > count) for rank in (low, high)}
    assert len(ids) in sizes, f"{place}: {len(ids)} entries, not {sorted(sizes)}"
    wrong = [i for i, value in zip(ids, got, strict=True) if not _close(value, want[i], tolerance)]
    assert not wrong, f"{place}: of {wrong[0]} it is {entry[wrong[0]].logprob}, the reference's is {want[wrong[0]]}"
    top = np.sort(want)[::-1][:count]
    ranked = sorted(got, reverse=True)[:count]
    is_top = all(_close(value, right, tolerance) for value, right in zip(ranked, top, strict=False))
    assert is_top, f"{place}: {ids} are not the {count} most likely"
    assert ids[0] == token or count == VOCAB_SIZE, f"{place}: {ids} does not begin with {token}"
    for i in ids:
        rank, (low, high) = entry[i].rank, rules.rank(want, i, tolerance)
        assert rank is not None and low <= rank <= high, f"{place}: rank of {i} is {rank}, not {low} to {high}"
        text = _decode(i)
        assert entry[i].decoded_token == text, f"{place}: text of {i} is {entry[i].decoded_token!r}, not {text!r}"


def check_chosen(model: TinyModel, asked: dict[str, Any], output: RequestOutput) -> None:
    """Checks values and ranks where a request asks for tokens of its choice (``logprob_token_ids`` among the parameters
    ``asked``), for the likeliest, or for none."""
    completion, prompt = output.outputs[0], list(output.prompt_token_ids or ())
    if not asked:
        assert completion.logprobs is None, "logprobs that were not asked for"
        return
    assert completion.logprobs is not None, f"{asked}: no logprobs"
    PRECISION.require_exact("ranks of chosen tokens")
    tokens = list(completion.token_ids)
    want = rules.log_softmax(logits_after(model, [*prompt, *tokens])[len(prompt) - 1 : -1].astype(np.float64))
    for place, row, token in zip(completion.logprobs, want, tokens, strict=True):
        assert place is not None
        best = np.argsort(-row, kind="stable")[: asked.get("logprobs", 0)].tolist()
        assert place.keys() == {token, *asked.get("logprob_token_ids", best)}, f"{asked}: {list(place)}"
        got = [each.logprob for each in place.values()]
        assert all(map(_close, got, row[list(place)])), f"{asked}: {got}, the reference's are {row[list(place)]}"
        # vLLM's front end numbers the chosen tokens from 1 on, and the last entry of a token counts.
        if token not in asked.get("logprob_token_ids", ()):
            assert place[token].rank == int((row >= row[token]).sum()), f"{asked}: rank of {token}"


_TEXTS: dict[int, str] = {}


def _decode(token: int) -> str:
    if not _TEXTS:
        tokenizer = make_tokenizer()
        _TEXTS.update((i, tokenizer.decode([i])) for i in range(VOCAB_SIZE))
    return _TEXTS[token]


def _close(value: float, want: float, tolerance: float = TOLERANCE) -> bool:
    return value == want or abs(value - want) <= tolerance
