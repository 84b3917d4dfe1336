"""Structured outputs after reasoning whose end lies among drafts: free text up to it, and the grammar from there on."""

from collections.abc import Callable

import pytest
from vllm import LLM
from vllm.sampling_params import StructuredOutputsParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.drafts import KnownDrafts, speculation
from model_runner_base.testing.engine import cache_bytes, metric, runner_of, sampled
from model_runner_base.testing.grammars import matches_regex
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reasoning import NAME, TokenParser, after_reasoning
from model_runner_base.testing.reference import Request

PROMPTS = random_prompts(190, [4, 9, 20, 33])
PATTERN = r"(ab|cd)[0-9]{3}(-[a-z]{2,5})?"
PLACES = range(3, 12)
"""Outputs after which reasoning may end."""
COUNT = 40


def ends_of(model: TinyModel) -> set[int]:
    """A token for each prompt, which its output has at one of the places, and neither a prompt nor an output before."""
    ends: set[int] = set()
    used = {token for prompt in PROMPTS for token in prompt}
    outputs = [model.greedy(prompt, PLACES.stop) for prompt in PROMPTS]
    used |= {token for output in outputs for token in output[: PLACES.start]}
    for output in outputs:
        ends |= {next(token for token in output[PLACES.start :] if token not in used)}
    return ends


@pytest.mark.parametrize("drafts", ["ngram", "same", None], ids=["known drafts", "draft model", "no drafts"])
def test_grammar_after_reasoning(
    drafts: str | None, text_engine: Callable[..., LLM], text_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text after the end of reasoning keeps to the grammar, wherever among drafts that end is."""
    config = None if drafts is None else speculation(drafts, text_model)
    options = {"backend": "xgrammar", "disable_any_whitespace": True, "reasoning_parser": NAME}
    llm = text_engine(
        speculative_config=config,
        structured_outputs_config=options,
        async_scheduling=drafts != "ngram",
        kv_cache_memory_bytes=2 * cache_bytes(text_model.path, 448),
    )
    ends = ends_of(text_model)
    monkeypatch.setattr(TokenParser, "ends", ends)
    if drafts == "ngram":
        known = KnownDrafts(llm, text_model, dict.fromkeys(PROMPTS, COUNT), is_wrong=False)
        monkeypatch.setattr(runner_of(llm).parts.drafter, "look_up", known.look_up)
    grammar = after_reasoning(matches_regex(PATTERN), ends)
    asked = StructuredOutputsParams(regex=PATTERN)
    params = sampled(COUNT, temperature=0, ignore_eos=False, structured_outputs=asked)
    requests = [Request(prompt, params, grammar) for prompt in PROMPTS]
    for _ in range(3):  # Known drafts are of other lengths each time.
        assert check_completions(llm, text_model, requests), "the grammar changed nothing"
    assert drafts is None or metric(llm, "vllm:spec_decode_num_draft_tokens"), "nothing was drafted"
