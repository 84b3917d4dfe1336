"""Calls to a running engine: reset of the prefix cache, calls of worker and model; and a fitted model length."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import engine
from greedy import expected, generate
from vllm import SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import metric
from model_runner_base.testing.models import TinyModel

FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4]}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_prefix_cache_is_reset_under_running_requests(is_async: bool, tiny_model: Callable[[str], TinyModel]) -> None:
    """Running requests are all set aside at once and start over, again and again; the tokens stay the same."""
    model = tiny_model("llama")
    prompts = random_prompts(60, [5, 30, 50, 9, 60, 12, 33, 41])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng(1)
    with engine(model.path, max_model_len=128, max_num_seqs=3, enforce_eager=True, async_scheduling=is_async) as llm:
        core, tokens, resets = llm.llm_engine, {}, 0
        scheduler = core.engine_core.engine_core.scheduler
        for index, prompt in enumerate(prompts):
            core.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
        while core.has_unfinished_requests():
            for output in core.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            if resets < 12 and scheduler.running and rng.random() < 0.2:
                resets += 1
                assert llm.reset_prefix_cache(reset_running_requests=True)
        assert resets == 12
        assert [tokens[index] for index in range(len(prompts))] == expected(model, prompts)
        assert generate(llm, prompts) == expected(model, prompts)


def test_prefix_cache_reset_when_idle_forgets(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    prompts = random_prompts(61, [70, 90])
    with engine(model.path, max_model_len=128, enforce_eager=True) as llm:
        assert generate(llm, prompts) == expected(model, prompts)
        assert llm.reset_prefix_cache()
        hits = metric(llm, "vllm:prefix_cache_hits")
        assert generate(llm, prompts) == expected(model, prompts)
        assert metric(llm, "vllm:prefix_cache_hits") == hits
        generate(llm, prompts)
        assert metric(llm, "vllm:prefix_cache_hits") > hits


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"additional_config": {"neuron_config": FEW_BUCKETS}}])
def test_model_length_is_fitted_to_the_memory(
    options: dict[str, object], tiny_model: Callable[[str], TinyModel]
) -> None:
    """The engine tells the worker before the caches exist how long a request can be, for max_model_len=-1."""
    model = tiny_model("llama")
    block_bytes = 32 * 2 * 2 * 16 * 4 * 2  # tokens, keys and values, heads, head size, float32, layers
    with engine(model.path, max_model_len=-1, kv_cache_memory_bytes=8 * block_bytes, **options) as llm:
        length = llm.model_config.max_model_len
        assert 7 * 32 <= length <= 8 * 32
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        assert runner.max_model_len == length == runner.parts.requests.token_ids.shape[1]
        # vLLM's fit counts the null block, which no request gets: one block less is what can be filled.
        prompts = random_prompts(62, [length - 32 - 20, 5])
        assert generate(llm, prompts) == expected(model, prompts)
        # A request that fills those blocks gets one token; a longer prompt is refused, and the engine goes on.
        full, too_long = random_prompts(64, [7 * 32, 7 * 32 + 1])
        assert generate(llm, [full], 5) == [expected(model, [full])[0][:1]]
        with pytest.raises(ValueError, match=f"a prompt of {7 * 32 + 1} tokens .* fit"):
            generate(llm, [too_long], 1)
        assert generate(llm, prompts) == expected(model, prompts)
        with pytest.raises(ValueError, match=f"cannot grow to {length + 1} once the KV cache is made for {length}"):
            llm.collective_rpc("update_max_model_len", args=(length + 1,))
        llm.collective_rpc("update_max_model_len", args=(100,))
        prompts = random_prompts(63, [70])
        assert generate(llm, prompts) == expected(model, prompts)


def test_cache_without_a_block_for_a_request_is_refused(tiny_model: Callable[[str], TinyModel]) -> None:
    """vLLM counts block 0 as one that a request can have, so a cache of one block would start and serve nothing."""
    block_bytes = 32 * 2 * 2 * 16 * 4 * 2
    limits = {"max_model_len": 32, "kv_cache_memory_bytes": block_bytes, "enforce_eager": True}
    with (
        pytest.raises(ValueError, match="the KV cache has too few blocks for any request"),
        engine(tiny_model("llama").path, **limits),
    ):
        pass


def test_calls_to_worker_and_model(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    with engine(model.path, max_model_len=128, enforce_eager=True) as llm:
        (tasks,) = llm.collective_rpc("get_supported_tasks")
        assert "generate" in tasks
        assert llm.collective_rpc("check_health") == [None]
        assert llm.collective_rpc(lambda worker, a, b: (type(worker).__name__, a, b), args=(1,), kwargs={"b": 2}) == [
            ("WorkerWrapperBase", 1, 2)
        ]
        (architecture,) = llm.apply_model(lambda module: type(module).__name__)
        assert architecture == "LlamaForCausalLM"
        with pytest.raises(NotImplementedError, match="no_such_method"):
            llm.collective_rpc("no_such_method")

        def zero(module: torch.nn.Module) -> None:
            module.lm_head.weight.data.zero_()

        llm.apply_model(zero)
        assert generate(llm, random_prompts(64, [9]), 5) == [[0] * 5], "the model that was changed is the one that runs"


def test_scales_of_fp8_caches_are_not_calculated_for_others(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    prompts = random_prompts(65, [5, 9])
    limits = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    buckets = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [1], "context_length_buckets": [64]}
    with engine(model.path, calculate_kv_scales=True, additional_config={"neuron_config": buckets}, **limits) as llm:
        assert generate(llm, prompts) == expected(model, prompts)
