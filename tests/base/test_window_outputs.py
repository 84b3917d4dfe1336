"""Outputs within windows, in a cache that holds fewer blocks than a chunk of a whole request would take."""

from collections.abc import Callable, Iterator

import pytest
from conftest import engine
from greedy import generate
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of, greedy
from model_runner_base.testing.models import TinyModel

NUM_BLOCKS, BLOCK = 6, 16
"""Five blocks of 16 tokens, beside the null block. A window of 40 tokens lies in four of them at most."""
AT_ONCE = (NUM_BLOCKS - 1) * BLOCK
LENGTH = 200


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("mistral-window")


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def llm(request: pytest.FixtureRequest, model: TinyModel) -> Iterator[LLM]:
    limits = {"max_model_len": LENGTH, "max_num_seqs": 4, "max_num_batched_tokens": 256, "block_size": BLOCK}
    options = {"num_gpu_blocks_override": NUM_BLOCKS, "async_scheduling": request.param, "enforce_eager": True}
    with engine(model.path, **limits, **options, enable_prefix_caching=False) as llm:
        yield llm


def test_outputs_go_on_beyond_the_blocks(llm: LLM, model: TinyModel) -> None:
    """A request gives back the blocks before its window, so its output ends with the model's length."""
    prompts = random_prompts(90, [AT_ONCE - 5, 20, AT_ONCE])
    want = [model.greedy(prompt, LENGTH - len(prompt)) for prompt in prompts]
    assert [generate(llm, [prompt], LENGTH)[0] for prompt in prompts] == want


def test_a_prompt_needs_its_blocks_at_once(llm: LLM, model: TinyModel) -> None:
    """A prompt that a step could not write is refused, and the next one is served."""
    (prompt,) = random_prompts(91, [AT_ONCE + 2])
    llm.llm_engine.add_request("long", {"prompt_token_ids": list(prompt)}, greedy(5))
    outputs = [output for _ in range(3) for output in llm.llm_engine.step()]
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"]
    (other,) = random_prompts(92, [30])
    assert generate(llm, [other], 5) == [model.greedy(other, 5)]


@pytest.mark.parametrize("length", [30, AT_ONCE, AT_ONCE + 1, AT_ONCE + 20])
def test_a_preempted_request_goes_on_or_ends(llm: LLM, model: TinyModel, length: int) -> None:
    """A request that is preempted while its blocks hold it is resumed. A longer one ends with an error, since it would
    need more blocks at once; none waits for ever."""
    (prompt,) = random_prompts(93, [20])
    core = llm.llm_engine
    core.add_request("one", {"prompt_token_ids": list(prompt)}, greedy(LENGTH))
    last, was_reset = None, False
    for _ in range(3 * LENGTH):
        for output in core.step():
            last = output
        num_tokens = 0 if last is None else 20 + len(last.outputs[0].token_ids)
        if num_tokens >= length and not was_reset:
            was_reset = core.reset_prefix_cache(reset_running_requests=True)
        if last is not None and last.finished:
            break
    assert was_reset and last is not None and last.finished and not core_of(llm).scheduler.requests
    tokens, want, reason = (
        list(last.outputs[0].token_ids),
        model.greedy(prompt, LENGTH - 20),
        last.outputs[0].finish_reason,
    )
    assert tokens == want[: len(tokens)]
    if length != AT_ONCE:  # There a token that is in flight decides.
        assert reason == ("length" if length == 30 else "error")
    assert (
        len(tokens) == LENGTH - 20 if reason == "length" else length - 20 <= len(tokens) < max(length, AT_ONCE + 3) - 18
    )


def test_chunks_in_flight_have_blocks(model: TinyModel) -> None:
    """A prompt of several chunks is served where two chunks in flight fill the cache."""
    limits = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": BLOCK}
    options = {"num_gpu_blocks_override": 9, "async_scheduling": True, "enforce_eager": True}
    (prompt,) = random_prompts(94, [180])
    with engine(model.path, **limits, **options, enable_prefix_caching=False) as llm:
        core = llm.llm_engine
        core.add_request("one", {"prompt_token_ids": list(prompt)}, greedy(10))
        outputs = [output for _ in range(40) for output in core.step()]
        last = outputs[-1].outputs[0]
        assert list(last.token_ids) == model.greedy(prompt, 10)
