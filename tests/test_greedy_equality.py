"""Greedy tokens equal HF transformers in float32, whatever the scheduler does with the requests."""

from collections.abc import Callable

import numpy as np
import pytest
from conftest import engine
from vllm import LLM, SamplingParams

from model_runner_base.testing.models import CONFIGS, VOCAB_SIZE, TinyModel

NEW_TOKENS = 20


def random_prompts(seed: int, lengths: list[int]) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(3, VOCAB_SIZE, length).tolist()) for length in lengths]


def generate(llm: LLM, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> list[list[int]]:
    return [model.greedy(prompt, count) for prompt in prompts]


def metric(llm: LLM, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def generate_with_arrivals(llm: LLM, prompts: list[tuple[int, ...]], seed: int) -> list[list[int]]:
    """Requests arrive and finish at random steps, and some strangers among them are aborted."""
    rng = np.random.default_rng(seed)
    core = llm.llm_engine
    waiting = list(enumerate(prompts))
    counts = {str(i): int(rng.integers(1, NEW_TOKENS + 1)) for i in range(len(prompts))}
    tokens: dict[str, list[int]] = {}
    strangers = 0
    while waiting or core.has_unfinished_requests():
        while waiting and rng.random() < 0.4:
            index, prompt = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=counts[str(index)], ignore_eos=True, detokenize=False)
            core.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
            if rng.random() < 0.3:
                params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False)
                core.add_request(f"stranger-{strangers}", {"prompt_token_ids": list(prompt[::-1])}, params)
                strangers += 1
        if strangers and rng.random() < 0.1:
            core.abort_request([f"stranger-{rng.integers(strangers)}"])
        for output in core.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    return [tokens[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    """One engine with few blocks and small chunks sees every way a request can be scheduled."""
    model = tiny_model(name)
    prompts = random_prompts(0, [1, 7, 16, 33, 64, 90, 130, 200])
    reference = expected(model, prompts)
    assert len({token for tokens in reference for token in tokens}) > 20, "the reference's outputs are not diverse"
    # 200 + 20 tokens are 7 blocks of 32; the four longest requests together need twice what there is. A sliding window
    # frees what lies behind it, so less must do there.
    num_blocks = 7 if "window" in name else 14
    with engine(model.path, max_model_len=256, num_gpu_blocks_override=num_blocks) as llm:
        assert generate(llm, prompts) == reference, "chunked prefill, mixed batches"
        generate(llm, prompts[4:6])
        hits = metric(llm, "vllm:prefix_cache_hits")
        assert generate(llm, prompts[4:6]) == reference[4:6], "prefix-cache hits"
        assert metric(llm, "vllm:prefix_cache_hits") > hits, "the prefix cache was not hit"
        llm.reset_prefix_cache()
        alone = [generate(llm, [prompt])[0] for prompt in prompts]
        assert alone == reference, "one request at a time"
        preemptions = metric(llm, "vllm:num_preemptions")
        long = random_prompts(1, [60, 70, 80, 90])
        assert generate(llm, long, 100) == expected(model, long, 100), "preemption and resume"
        assert metric(llm, "vllm:num_preemptions") > preemptions, "nothing was preempted"
        mixed = generate_with_arrivals(llm, prompts * 2, seed=2)
        assert mixed == [full[: len(got)] for full, got in zip(reference * 2, mixed, strict=True)], "random arrivals"


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"async_scheduling": False}, {"block_size": 16}])
def test_equals_transformers_however_it_runs(
    options: dict[str, object], tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model("llama")
    prompts = random_prompts(3, [5, 40, 150, 300])
    with engine(model.path, max_model_len=512, **options) as llm:
        assert generate(llm, prompts) == expected(model, prompts)


def test_tiny_chunks(tiny_model: Callable[[str], TinyModel]) -> None:
    """Four tokens a step: every prompt is cut within blocks and tiles, decodes and chunks share every step."""
    model = tiny_model("llama")
    prompts = random_prompts(4, [3, 9, 50, 75])
    with engine(model.path, max_model_len=128, max_num_batched_tokens=4, max_num_seqs=3) as llm:
        assert generate(llm, prompts) == expected(model, prompts)


def test_default_settings(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    prompts = random_prompts(5, [1, 30, 255, 256, 257, 490] * 4)
    with engine(model.path, max_num_seqs=None, max_num_batched_tokens=None) as llm:
        assert generate(llm, prompts) == expected(model, prompts)
