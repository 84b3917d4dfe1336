"""Kimi-Linear: layers of Kimi Delta Attention, latent attention and experts, against what transformers 5 answered.

A user of either release of vLLM would notice a wrong token or log probability, a start that is refused, or a stop of
the engine while a graph is compiled.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import compilations, engine
from recorded_recurrent import NEW_TOKENS, VALUED, recorded, write_checkpoint
from test_recurrent_models import OPTIONS, TOLERANCE, spoil
from vllm import LLM

from model_runner_base.testing.checks.test_equality import run_with_arrivals, run_with_resets
from model_runner_base.testing.engine import core_of, generate, greedy, metric, runner_of, tokens_of

FACTS = recorded()["kimi-linear"]
PROMPTS = [tuple(prompt) for prompt, _ in FACTS["answers"]]
WANTED = [tokens for _, tokens in FACTS["answers"]]
COUNTS = [NEW_TOKENS] * len(PROMPTS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kimi-linear")
    write_checkpoint(directory, FACTS["config"], FACTS["shapes"])
    return directory


def check(llm: LLM, at: slice = slice(None)) -> None:
    assert tokens_of(generate(llm, PROMPTS[at], greedy(NEW_TOKENS))) == WANTED[at]


def check_values(llm: LLM) -> None:
    """Checks log probabilities of prompts' tokens."""
    outputs = generate(llm, PROMPTS[VALUED], greedy(1, prompt_logprobs=0))
    for prompt, output, values in zip(PROMPTS[VALUED], outputs, FACTS["values"], strict=True):
        pairs = zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
        got = [entry[token].logprob for token, entry in pairs if entry]
        np.testing.assert_allclose(got, values, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 64])
def test_chunks(num_tokens: int, path: Path) -> None:
    """Chunks of a few tokens to whole tiles; requests that arrive at any step, some aborted, or all preempted."""
    options = OPTIONS | {"max_num_batched_tokens": num_tokens, "max_num_seqs": min(num_tokens, 3)}
    with engine(path, **options) as llm:
        for index in range(6):
            check(llm, slice(index, index + 1))
        if num_tokens == 1:
            return
        spoil(llm)
        check_values(llm)
        assert run_with_arrivals(llm, PROMPTS, COUNTS, np.random.default_rng(4)) == WANTED
        if num_tokens > 7:  # Else a long prompt would never be done before the next reset.
            assert run_with_resets(llm, PROMPTS[:8], NEW_TOKENS) == WANTED[:8]


def test_few_blocks_preempt(path: Path) -> None:
    """Requests that lose the blocks of their latents are computed again, and so are their states."""
    with engine(path, **OPTIONS, max_model_len=128, block_size=16, num_gpu_blocks_override=16) as llm:
        check(llm, slice(4, 8))
        assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"


def test_prefixes_are_hit(path: Path) -> None:
    """A prompt that goes on after an earlier one reads its latents and its state."""
    with engine(path, **OPTIONS, enable_prefix_caching=True, block_size=16) as llm:
        check(llm)
        outputs = generate(llm, PROMPTS[-3:], greedy(NEW_TOKENS))
        assert tokens_of(outputs) == WANTED[-3:]
        assert all(output.num_cached_tokens for output in outputs), "no prefix was hit"


def test_drafts(path: Path) -> None:
    """Drafts that repeat earlier tokens, and are wrong."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with engine(path, **OPTIONS, speculative_config=drafts) as llm:
        check(llm)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0


@pytest.mark.openxla
def test_compiled(path: Path) -> None:
    """The same tokens by graphs, and no compilation after warm-up."""
    largest: dict[str, Any] = {"neuron_config": {"max_padding": 1}}
    with engine(path, **OPTIONS | {"enforce_eager": False}, additional_config=largest) as llm:
        before = compilations()
        check(llm, slice(5))
        spoil(llm)
        check(llm)
        assert compilations() == before


def test_states(path: Path) -> None:
    """A delta layer keeps the inputs of one convolution and a state, next to the group of latents."""
    with engine(path, **OPTIONS) as llm:
        layers = runner_of(llm).vllm_config.compilation_config.static_forward_context.values()
        caches = [layer.kv_cache for layer in layers if hasattr(layer, "get_state_shape")]
        states = [cache[0] if isinstance(cache[0], tuple) else cache for cache in caches]
        assert [[tuple(part.shape[1:]) for part in each] for each in states] == [[(3, 3 * 64), (4, 16, 16)]] * 2
        assert len(core_of(llm).scheduler.kv_cache_config.kv_cache_groups) == 2


def test_a_limited_decay_is_refused(path: Path, tmp_path: Path) -> None:
    config = FACTS["config"] | {"linear_attn_config": FACTS["config"]["linear_attn_config"] | {"gate_lower_bound": -5}}
    write_checkpoint(tmp_path, config, FACTS["shapes"])
    with pytest.raises(ValueError, match="without gate_lower_bound"), engine(tmp_path, **OPTIONS):
        pass
