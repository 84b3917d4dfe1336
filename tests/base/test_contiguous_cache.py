"""Contiguous cache: ``block_size=max_model_len`` gives the same tokens, by whole cache lines or tile by tile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import dense_attention, first_key
from bare_step import BareStep, scheduled
from conftest import engine
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from vllm import LLM, EngineArgs, SamplingParams
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.attention.plan import CAUSAL, KeyRange, kv_tile_for, stored_block_size
from model_runner_base.caches.contiguous import ContiguousDecode, num_lines, useful_memory
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.step.batch import BatchBuilder
from model_runner_base.step.request_states import BlockTable, RequestInfo
from model_runner_base.step.sizes import COMMON_DIMS, StepKind, StepLimits, StepSize, Tiling
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import NEW_TOKENS, PROMPTS, check, run_with_arrivals
from model_runner_base.testing.checks.test_schedules import OPTIONS, Schedules, bench_of
from model_runner_base.testing.engine import generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.vllm_compat.types.kv_cache import CacheLayout
from neuron_runner.metrics import CompilationCount

MAX_LENGTH = 320
FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [64, MAX_LENGTH]}


@contextmanager
def kinds_of_steps(llm: LLM) -> Iterator[set[StepKind]]:
    """Kinds of the sizes that are packed inside the block."""
    policy = runner_of(llm).graph_policy
    choose = policy.choose
    kinds: set[StepKind] = set()

    def recorded(needs: list[StepSize]) -> StepSize:
        size = choose(needs)
        kinds.add(size.kind)
        return size

    policy.choose = recorded
    try:
        yield kinds
    finally:
        del policy.choose


def test_compiled_tokens_equal_the_reference(tiny_model: Callable[[str], TinyModel]) -> None:
    """Tokens are the reference's in mixed batches, chunked prompts and arrivals, and when all requests are set aside
    at once. Nothing compiles after warm-up."""
    model = tiny_model("llama")
    options = {"additional_config": {"neuron_config": FEW_BUCKETS}, "max_model_len": MAX_LENGTH}
    with engine(model.path, block_size=MAX_LENGTH, **options) as llm:
        runner = runner_of(llm)
        warm = CompilationCount.now()
        with kinds_of_steps(llm) as kinds:
            check(llm, model, PROMPTS)
            check(llm, model, random_prompts(1, [200, 205, 210, 190]), 100)
            rng = np.random.default_rng(2)
            counts = rng.integers(1, NEW_TOKENS + 1, 2 * len(PROMPTS)).tolist()
            check_equal(model, PROMPTS * 2, run_with_arrivals(llm, PROMPTS * 2, counts, rng), counts)
            core = llm.llm_engine
            for name, prompt in zip("ab", PROMPTS[3:5], strict=True):
                core.add_request(name, {"prompt_token_ids": list(prompt)}, greedy(30))
            for _ in range(9):
                core.step()
            core.engine_core.reset_prefix_cache(reset_running_requests=True)
            tokens = {}
            while core.has_unfinished_requests():
                tokens |= {out.request_id: list(out.outputs[0].token_ids) for out in core.step() if out.finished}
            assert tokens == {name: model.greedy(p, 30) for name, p in zip("ab", PROMPTS[3:5], strict=True)}
        assert kinds == set(StepKind)
        assert CompilationCount.now() == warm
        # A line for each request, whatever memory there is, and the null block.
        assert [cache.shape[0] * cache.shape[1] for cache in runner.parts.kv_caches] == [5 * MAX_LENGTH] * 2
        addresses = [runner.device_ops.buffer_address(cache) for cache in runner.parts.kv_caches]
        check(llm, model, random_prompts(1, [200, 205, 210, 190]))
        assert [runner.device_ops.buffer_address(cache) for cache in runner.parts.kv_caches] == addresses
        assert metric(llm, "vllm:num_preemptions") == 2, "only those that were set aside"


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_random_schedules(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    """Schedules of the kit hold, step by step against a model without memory, with lines for all requests or some."""
    model = tiny_model(name)
    # Gemma's requests take a line in each of its two KV-cache groups, so that half of the lines are not a group's.
    options = OPTIONS | {"block_size": 352, "num_gpu_blocks_override": 4 if name == "llama" else 5}
    with (
        engine(model.path, enforce_eager=True, **options) as llm,
        bench_of(llm, model) as bench,
        kinds_of_steps(llm) as kinds,
    ):
        run_state_machine_as_test(
            partial(Schedules, bench),  # type: ignore[arg-type]
            settings=settings(
                max_examples=5,
                stateful_step_count=30,
                deadline=None,
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert kinds == ({StepKind.DECODE, StepKind.MIXED} if name == "gemma3" else set(StepKind))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_length_between_tiles_and_synchronous_scheduling(
    prefix_caching: bool, tiny_model: Callable[[str], TinyModel]
) -> None:
    """A block may be longer than the longest request, which is no whole number of tiles."""
    model = tiny_model("gpt2")
    options = {"max_model_len": 251, "enable_prefix_caching": prefix_caching, "async_scheduling": False}
    with engine(model.path, enforce_eager=True, block_size=300, **options) as llm, kinds_of_steps(llm) as kinds:
        prompts = random_prompts(4, [1, 49, 51, 101, 230, 228])
        assert tokens_of(generate(llm, prompts, greedy(21))) == [model.greedy(prompt, 21) for prompt in prompts]
    assert StepKind.DECODE_CONTIGUOUS in kinds


@given(
    contexts=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    idle=st.integers(0, 2),
    key_range=st.sampled_from(
        [CAUSAL, *(KeyRange(window=width) for width in (1, 7, 100)), KeyRange(chunk=7), KeyRange(chunk=32)]
    ),
    heads=st.sampled_from([(4, 2), (6, 1), (18, 9)]),
    steps=st.integers(0, 40),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60), deadline=None)
def test_lines_equal_dense_attention_while_they_are_repeated(
    contexts: list[int], idle: int, key_range: KeyRange, heads: tuple[int, int], steps: int, seed: int
) -> None:
    """Contiguous decode equals dense attention with idle lines, padding tokens, and NaN in all that is not written."""
    rng = np.random.default_rng(seed)
    (num_heads, num_kv_heads), head_size, tile, parts = heads, 4, 16, 9
    count, num_lines = len(contexts), len(contexts) + idle
    table = BlockTable(count, 144, tile, 1, parts)
    lines = rng.permutation(num_lines)[:count] + 1
    decode, chunk = Tiling(1, tile), Tiling(16, tile)
    limits = StepLimits(99, 6, 144, decode, chunk, (*COMMON_DIMS, *plan_dims(decode, chunk)), num_lines)
    groups = [AttentionGroup(["layer"], table, tile, tile, key_range)]
    bare = BareStep([PagedCaches(groups, limits), ContiguousDecode(groups, limits)], limits, count, 144)
    names = [f"request {index}" for index in range(count)]
    for name in rng.permutation(names).tolist():
        index = names.index(name)
        # The last token of the prompt is computed first, those before it were found in the cache.
        prompt = list(range(100, 100 + contexts[index]))
        row = bare.requests.admit(name, RequestInfo(SamplingParams(), 0, prompt), prompt, contexts[index] - 1)
        table.assign(row, [int(lines[index])])
    everyone = scheduled(dict.fromkeys(names, 1))
    batch = BatchBuilder(bare.requests, bare.layout.order).build(everyone)
    by_pairs, by_lines = bare.layout.needs(batch)
    assert (by_pairs.kind, by_lines.kind) == (StepKind.DECODE, StepKind.DECODE_CONTIGUOUS)
    needed = -(-max(contexts) // tile) * num_lines
    assert limits.named(by_lines) == limits.named(
        limits.size(
            StepKind.DECODE_CONTIGUOUS,
            tokens=count,
            requests=count,
            logits=count,
            decode_rows=count,
            decode_pairs=needed,
        )
    )
    size = limits.size(
        StepKind.DECODE_CONTIGUOUS,
        tokens=count + 1,
        requests=count + 1,
        logits=count + 1,
        decode_rows=count + 1,
        decode_pairs=num_lines * parts,
    )
    packed = bare.send(batch, size)

    impl = PagedAttentionImpl(
        num_heads, head_size, head_size**-0.5, num_kv_heads, sliding_window=key_range.window or None
    )
    cache = torch.full(((num_lines + 1) * parts, tile, 2 * num_kv_heads, head_size), float("nan"))
    cache[:parts] = 0.0
    by_line = cache.view(num_lines + 1, -1, 2 * num_kv_heads, head_size)
    for line, context in zip(lines, contexts, strict=True):
        by_line[line, : context - 1] = torch.from_numpy(rng.normal(size=by_line[line, : context - 1].shape)).float()
    tokens = [99 + context for context in contexts]
    for step in range(steps + 1):
        if step:
            before = bare.requests.num_computed.copy()
            repeated = bare.repeat.advance(everyone)
            if repeated is None:
                assert max(contexts) + step > parts * tile, "the line was not full"
                assert (bare.requests.num_computed == before).all(), "the step would be counted twice"
                return
            assert max(contexts) + step <= parts * tile and repeated == (batch, packed)
            assert packed.is_whole == (step == 1) and not packed.entries.count[0], "lines never change"
        call = bare.run(batch, packed)
        assert call.token_ids.tolist() == [*tokens, 0]
        assert call.positions.tolist() == [*(context + step - 1 for context in contexts), 0]
        query = torch.from_numpy(rng.normal(size=(count + 1, num_heads * head_size))).float()
        key, value = torch.from_numpy(rng.normal(size=(2, count + 1, num_kv_heads * head_size))).float()
        out = impl.forward(None, query, key, value, cache, call.metadata["layer"])  # type: ignore[arg-type]
        assert torch.isfinite(out).all()
        trace = bare.trace(call, batch)["layer"]
        for index, (line, context) in enumerate(zip(lines, contexts, strict=True)):
            own = by_line[line, : context + step].numpy()
            np.testing.assert_array_equal(own[-1, :num_kv_heads].ravel(), key[index])
            np.testing.assert_array_equal(own[-1, num_kv_heads:].ravel(), value[index])
            want = dense_attention(
                query[index].view(num_heads, head_size).numpy(),
                own[:, :num_kv_heads],
                own[:, num_kv_heads:],
                context + step - 1,
                key_range,
                None,
            )
            np.testing.assert_allclose(out[index].view(num_heads, head_size), want, atol=2e-5)
            # The kit is told the same.
            keys = np.arange(first_key(key_range, context + step - 1), context + step)
            np.testing.assert_array_equal(trace.seen[index].positions, keys)
            np.testing.assert_array_equal(trace.seen[index].slots, line * parts * tile + keys)
            assert trace.slots[index] == line * parts * tile + context + step - 1
        tokens = rng.integers(0, 1000, count).tolist()
        bare.commit(call, [*tokens, 7])


@given(st.one_of(st.integers(1, 256), st.integers(1, 200).map(lambda count: 64 * count)))
@settings(deadline=None)
def test_tiles_are_parts_of_a_block_or_whole_blocks(block_size: int) -> None:
    tile, stored = kv_tile_for(block_size), stored_block_size(block_size, 64)
    assert 16 <= tile <= 256 and tile % stored == 0 and block_size % stored == 0
    assert tile == 64 or block_size % 64


@given(st.integers(1, 64))
def test_tiles_of_kernels_are_what_they_multiply_at_a_time(count: int) -> None:
    """A KV tile is whole 128s in blocks of whole 128s, as neuron_runner/nki asks."""
    tile = kv_tile_for(128 * count, 512)
    assert tile % 128 == 0 and (128 * count % tile == 0 or tile % (128 * count) == 0)


@pytest.mark.parametrize(("num_full", "num_sliding"), [(4, 0), (4, 22), (5, 29), (2, 3), (12, 12)])
def test_useful_memory_holds_every_request(
    num_full: int, num_sliding: int, tiny_model: Callable[[str], TinyModel]
) -> None:
    """Memory is useful for a line a request in each of vLLM's groups of layers, and the null block, as vLLM counts."""
    config = EngineArgs(
        str(tiny_model("llama").path), max_model_len=MAX_LENGTH, block_size=MAX_LENGTH, max_num_seqs=64
    ).create_engine_config()
    sizes = {"block_size": MAX_LENGTH, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    specs: dict[str, KVCacheSpec] = {f"full.{index}": FullAttentionSpec(**sizes) for index in range(num_full)}
    for index in range(num_sliding):
        specs[f"sliding.{index}"] = SlidingWindowSpec(**sizes, sliding_window=64)
    groups = get_kv_cache_groups(config, specs)
    for spare, missing in ((0, 0), (-1, 1)):
        memory = int(useful_memory(config, specs)) + spare
        blocks = get_kv_cache_config_from_groups(config, groups, memory).num_blocks
        assert blocks == 1 + 64 * len(groups) - missing


def test_block_that_has_no_parts_is_refused(tiny_model: Callable[[str], TinyModel]) -> None:
    message = "block_size=509 cannot be read in parts of 16 to 256 tokens: use a multiple of 64, such as 512"
    with pytest.raises(ValueError, match=message), engine(tiny_model("llama").path, block_size=509):
        pass


def test_server_takes_any_block_size() -> None:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--block-size", "320"])
    assert arguments.block_size == 320


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "num_groups", "lines"),
    [(1024, 9, 1, 8), (1024, 5, 1, 4), (1024, 10, 1, 0), (1024, 9, 2, 0), (512, 9, 1, 0), (2048, 9, 1, 8)],
    ids=["a line a request", "fewer", "more lines than requests", "two groups", "paged", "longer lines"],
)
def test_when_decode_may_go_by_lines(block_size: int, num_blocks: int, num_groups: int, lines: int) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_size),
        model_config=SimpleNamespace(max_model_len=1024),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    groups: list[Any] = [None] * num_groups
    assert num_lines(CacheLayout(num_blocks, groups, []), config) == lines  # type: ignore[arg-type]
