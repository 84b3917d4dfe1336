"""Prefix caching of models with recurrent layers: a hit begins with the state at its end, and nothing else is hit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import engine
from lane import HAS_OPENXLA
from vllm import LLM

from model_runner_base.scheduling.corrections.prefixes import chunk_end
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import run_with_arrivals, run_with_resets
from model_runner_base.testing.checks.test_multimodal import Prompt, ask, expected, read
from model_runner_base.testing.engine import core_of, generate, greedy, tokens_of
from model_runner_base.testing.images import make_seeing_model, picture
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.vllm_compat.types.recurrent import num_states

Tiny = Callable[[str], TinyModel]
Prompts = list[tuple[int, ...]]
SIZE = 16
"""Number of tokens of a block."""
NEW_TOKENS = 20
OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 4 << 20,
    "block_size": SIZE,
    "max_num_seqs": 6,
    "enable_prefix_caching": True,
    "enforce_eager": True,
}


def cached(llm: LLM, model: TinyModel, prompts: Prompts, count: int = NEW_TOKENS) -> list[int]:
    """Checks the tokens of the prompts in one batch, and returns how many of each prompt were cached."""
    outputs = generate(llm, prompts, greedy(count))
    check_equal(model, prompts, tokens_of(outputs), [count] * len(prompts))
    return [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module", params=[("qwen3-next", True), ("lfm2", False), ("mamba2", True)], ids=lambda p: p[0])
def served(request: pytest.FixtureRequest, tiny_model: Tiny) -> Iterator[tuple[LLM, TinyModel]]:
    """An engine of gated delta nets, short convolutions, or Mamba 2 without attention; the second is synchronous."""
    name, is_async = request.param
    model = tiny_model(name)
    # Steps of 40 tokens: chunks end at every other block, and some prompts are in one chunk but for their last block.
    with engine(model.path, **OPTIONS, async_scheduling=is_async, max_num_batched_tokens=40) as llm:
        scheduler = core_of(llm).scheduler
        assert scheduler.need_mamba_block_aligned_split
        pool = scheduler.kv_cache_manager.coordinator.single_type_managers[-1].block_pool
        assert pool.num_gpu_blocks == 1 + num_states(llm.llm_engine.vllm_config)
        yield llm, model


def test_hits_at_boundaries(served: tuple[LLM, TinyModel]) -> None:
    """Prompts that end a token before, at and after the end of a block; their last token is never hit."""
    lengths = [blocks * SIZE + offset for blocks in (1, 2, 5) for offset in (-1, 0, 1)]
    want = [(length - 1) // SIZE * SIZE for length in lengths]
    for prompt, hit in zip(random_prompts(101, lengths), want, strict=True):
        assert cached(*served, [prompt], 4) == [0]
        assert cached(*served, [prompt], 4) == [hit]
        assert cached(*served, [prompt[:hit] + prompt], 4) == [hit]  # Other tokens after the hit.
    prompts = random_prompts(102, lengths)[-4:]
    cached(*served, prompts)
    # Others may have given up their states for these.
    assert cached(*served, prompts[-2:]) == want[-2:]


def test_the_same_prompt_in_one_step(served: tuple[LLM, TinyModel]) -> None:
    """Requests do not read the state that another one writes in the same step."""
    for prompt in random_prompts(103, [17, 35, 100]):
        cached(*served, [prompt] * 4)
        assert cached(*served, [prompt] * 3) == [(len(prompt) - 1) // SIZE * SIZE] * 3


def test_outputs_continued(served: tuple[LLM, TinyModel]) -> None:
    """Prompts that go on after outputs of others, which were preempted: no block is hit that was left half-way."""
    llm, model = served
    prompts = random_prompts(104, [30, 47, 60])
    check_equal(model, prompts, run_with_resets(llm, prompts, 40), [40] * len(prompts))
    longer: Prompts = [(*prompt, *model.greedy(prompt, 40), 3) for prompt in prompts]
    for more in ((), (3,)):
        hits = [cached(llm, model, [prompt + more], 3) for prompt in longer]
    assert [hit for (hit,) in hits] == [(len(prompt) - 1) // SIZE * SIZE for prompt in longer]


@pytest.mark.skipif(not HAS_OPENXLA, reason="vLLM 0.33 leaves out that state")
def test_prompt_of_a_resumed_request(served: tuple[LLM, TinyModel]) -> None:
    """A prompt is hit at its last block though the request that computed it had outputs by then.

    A server that runs out of memory preempts, and would else compute popular prompts again.
    """
    llm, model = served
    prompts = random_prompts(113, [36, 51])
    # Both were set aside after some tokens, the cache was forgotten, and they were computed from their first token on.
    check_equal(model, prompts, run_with_resets(llm, prompts, 30), [30] * 2)
    assert cached(llm, model, prompts, 4) == [32, 48]


def test_outputs_of_others(served: tuple[LLM, TinyModel]) -> None:
    """A prompt is still hit after others have entered more blocks than there are states."""
    llm, model = served
    (prompt, *others) = random_prompts(112, [50, 1, 1, 1, 1, 1])
    cached(llm, model, [prompt], 4)
    generate(llm, others, greedy(100))
    assert cached(llm, model, [prompt], 4) == [48]


def test_arrivals(served: tuple[LLM, TinyModel]) -> None:
    """Requests that arrive, finish and are aborted at any step, with prefixes in common."""
    llm, model = served
    starts, ends = random_prompts(105, [16, 30, 50]), random_prompts(106, [1, 2, 20, 40])
    prompts = [start + end for start in starts for end in ends]
    rng = np.random.default_rng(107)
    counts = rng.integers(1, NEW_TOKENS + 1, len(prompts)).tolist()
    check_equal(model, prompts, run_with_arrivals(llm, prompts, counts, rng), counts)


@pytest.mark.skipif(HAS_OPENXLA, reason="vLLM 0.16 has no recurrent model with images that is served")
def test_images(tmp_path: Path) -> None:
    """A prefix with an image is hit, also in the midst of the image; the same text with another image is not.

    A user who sends a second picture with the same question would else be told of the first.
    """
    model = make_seeing_model("qwen3.5", tmp_path)
    one, other, small = picture(1, 64, 64), picture(2, 64, 64), picture(3, 24, 16)
    see = model.placeholder
    text = f"what of this one, please: {see}."
    ids = model.greedy(text, [one], 1)[0]
    hit, shown = (len(ids) - 1) // SIZE * SIZE, max(ids, key=ids.count)
    assert ids.count(shown) == 64 and ids[hit - 1] == ids[hit] == shown, "the hit ends inside the image"
    # Two images of 64 tokens in a step that encodes one: a chunk ends before the second, within a block.
    two = f"a {see}{see} b"
    with engine(model.path, **OPTIONS, skip_tokenizer_init=False, max_num_batched_tokens=40) as llm:

        def ask_for(*asked: Prompt) -> list[int]:
            outputs = ask(llm, list(asked))
            assert read(outputs) == expected(model, list(asked))
            return [output.num_cached_tokens for output in outputs]

        assert ask_for((text, [one])) == [0]
        assert ask_for((f"{text} Why is it so?", [one])) == [hit]
        assert ask_for((text, [other])) == [0]
        assert ask_for((text, [one]), (text, [other]), (f"{text} Then go on.", [other])) == [hit] * 3
        pairs = [(two, [one, other]), (two, [other, one]), (two, [small, one]), (two, [one, small])]
        for _ in range(2):
            ask_for(*pairs)


def test_reset(served: tuple[LLM, TinyModel]) -> None:
    llm, model = served
    (prompt,) = random_prompts(106, [50])
    cached(llm, model, [prompt])
    assert llm.reset_prefix_cache()
    assert cached(llm, model, [prompt]) == [0]
    assert cached(llm, model, [prompt]) == [48]


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        pytest.param(
            "mamba_cache_mode",
            "all",
            "mamba_cache_mode=all is ",
            marks=pytest.mark.skipif(not HAS_OPENXLA, reason="vLLM 0.33 ignores the setting"),
        ),
        ("mamba_block_size", 64, "mamba_block_size=64 is "),
        ("long_prefill_token_threshold", 8, "long_prefill_token_threshold=8 is "),
        ("disable_chunked_mm_input", True, "leave out disable_chunked_mm_input"),
    ],
)
def test_states_at_other_places_are_refused(setting: str, value: Any, words: str, tiny_model: Tiny) -> None:
    options = OPTIONS | {setting: value}
    with (
        pytest.raises(ValueError, match=words),
        engine(tiny_model("lfm2").path, **options),
    ):
        pass


def test_chunks_end_with_blocks() -> None:
    """A chunk that begins inside a block ends with it at the latest; the last full block gets the state at its end."""
    rng = np.random.default_rng(108)
    for _ in range(2000):
        known, size, may_wait = int(rng.integers(2, 60)), int(rng.integers(1, 9)), bool(rng.integers(2))
        start = int(rng.integers(known)) // size * size if may_wait else 0
        ends, hit = {start}, known - size * int(rng.integers(2))
        last = max(hit - 1, 0) // size * size
        while start < known:
            # A step with enough space for a block comes at last; without waiting, any step takes the request further.
            most = int(rng.integers(1, 12)) if rng.random() < 0.8 else 12
            end = chunk_end(start, min(start + most, known), known, hit, size, may_wait)
            assert start <= end <= start + most
            assert end > start or (may_wait and most < size)
            assert start % size == 0 or end <= (start // size + 1) * size, "a block is left half-way"
            start = end
            ends.add(end)
        assert last in ends or last < min(ends)
