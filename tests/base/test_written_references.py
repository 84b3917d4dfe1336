"""Models that transformers does not compute as published, against others: Ling, Step 3, Step 3.5, Mamba 2 with groups.

A user would notice wrong tokens and log probabilities where experts are chosen by groups, where a part of a head turns
with its position, where queries are of low rank, where activations are clamped, or where a norm has groups.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine
from lane import HAS_OPENXLA
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from written_mamba import MAMBA_2, mamba_2
from written_references import LING, LING_2, STEP, STEP_3, Make, Reference, ling, step, step_3, step_shapes, write

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, tokens_of

PROMPTS = random_prompts(140, [1, 5, 16, 33, 90, 200])
NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {"enforce_eager": True, "max_logprobs": -1, "block_size": 16}
RECORDED = [
    [183, 220, 251, 278, 37, 410, 416, 182, 61, 183, 7, 221],
    [150, 289, 63, 117, 471, 38, 89, 275, 137, 79, 395, 437],
]
"""Greedy tokens of Step 3.5 after the last two prompts."""


@torch.no_grad()
def check(llm: LLM, reference: Reference, prompts: list[tuple[int, ...]]) -> list[Any]:
    """Compares each token, and the log probabilities of the whole vocabulary."""
    outputs = generate(llm, prompts, greedy(NEW_TOKENS, logprobs=-1))
    for prompt, output, tokens in zip(prompts, outputs, tokens_of(outputs), strict=True):
        want = reference(torch.tensor([*prompt, *tokens[:-1]]))[len(prompt) - 1 :].log_softmax(-1)
        assert tokens == want.argmax(-1).tolist()
        entries = output.outputs[0].logprobs or []
        got = torch.tensor([[place[token].logprob for token in range(VOCAB_SIZE)] for place in entries])
        torch.testing.assert_close(got, want, rtol=0, atol=2e-4)
    return outputs


LATER = pytest.mark.skipif(HAS_OPENXLA, reason="this release computes less of Ling, or transformers has no class")


@pytest.mark.parametrize(
    ("make", "config", "num_tokens"),
    [
        pytest.param(ling, LING, 64, marks=LATER, id="ling"),
        pytest.param(ling, LING_2, 16, id="ling-2"),
        pytest.param(step_3, STEP_3, 64, id="step-3"),
        pytest.param(step, STEP, 16, marks=LATER, id="step-3.5"),
    ],
)
def test_equals_reference(make: Make, config: dict[str, Any], num_tokens: int, tmp_path: Path) -> None:
    """A prompt alone, prompts in a batch and in chunks next to requests that generate, prefixes from the cache."""
    reference = make(tmp_path / "model", config)
    with engine(tmp_path / "model", **OPTIONS, max_num_batched_tokens=num_tokens) as llm:
        assert llm.llm_engine.model_config.architecture == config["architectures"][0]
        check(llm, reference, PROMPTS[3:4])
        check(llm, reference, PROMPTS)
        outputs = check(llm, reference, PROMPTS[-2:])
        assert all(output.num_cached_tokens for output in outputs), "the prefix cache was not hit"


def test_norms_by_groups(tmp_path: Path) -> None:
    """Mamba 2 with two groups: prompts in a batch and in chunks."""
    reference = mamba_2(tmp_path / "model", MAMBA_2)
    with engine(tmp_path / "model", **OPTIONS, max_num_batched_tokens=64, kv_cache_memory_bytes=4 << 20) as llm:
        check(llm, reference, PROMPTS[1:5])


@pytest.mark.skipif(not HAS_OPENXLA, reason="compared with transformers itself")
def test_recorded_tokens(tmp_path: Path) -> None:
    """Step 3.5 on the release of vLLM whose transformers has no such model: tokens that the later one answered."""
    write(tmp_path / "model", STEP, step_shapes(STEP))
    with engine(tmp_path / "model", **OPTIONS) as llm:
        assert tokens_of(generate(llm, PROMPTS[-2:], greedy(NEW_TOKENS))) == RECORDED


@LATER
def test_drafts_by_mtp_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model", STEP, {})
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(ValueError, match="drafts by mtp are not supported with Step3p5ForCausalLM yet"):
        EngineArgs(
            str(tmp_path / "model"), skip_tokenizer_init=True, max_model_len=64, speculative_config=drafts
        ).create_engine_config()


@pytest.mark.skipif(not HAS_OPENXLA, reason="later releases compute them")
@pytest.mark.parametrize(
    ("changes", "words"),
    [({"norm_head": True}, "without norm_head"), ({"rotary_dim": ...}, "set rotary_dim to 8 in config.json")],
    ids=["norm_head", "partial_rotary_factor"],
)
def test_fields_that_vllm_leaves_out_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = {name: value for name, value in (LING_2 | changes).items() if value is not ...}
    ling(tmp_path / "model", config)
    with pytest.raises(ValueError, match=words):
        EngineArgs(str(tmp_path / "model"), skip_tokenizer_init=True).create_engine_config()
