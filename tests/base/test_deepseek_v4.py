"""DeepSeek V4: a window beside compressed entries, of which an indexer chooses or tokens see all, hyper-connections,
experts by token; equal to transformers in float32."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import engine
from test_latent_attention import check, largest_error
from test_sparse_attention import check_arrivals
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs

from model_runner_base.attention.choice import KeyTable
from model_runner_base.attention.compressed import CompressedMetadata, PageSlot, Windows
from model_runner_base.attention.metadata import NEVER, PairPlan
from model_runner_base.attention.plan import FAR
from model_runner_base.models.layers.hyper_connections import after_block, at_head, before_block
from model_runner_base.testing.architectures import hf
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.compressed_models import SIZES, make_compressed
from model_runner_base.testing.engine import generate, greedy, metric, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel, vary
from model_runner_base.testing.reference import logits_after
from model_runner_base.vllm_compat.probes.models import misread_positions

pytestmark = pytest.mark.newest
PROMPTS = random_prompts(150, [1, 3, 4, 25, 90, 127, 129, 300])
"""Prompts that end around windows of 24 tokens, entries of 4 and of 128, and the number of chosen entries."""
LENGTH, BLOCK = 384, 128
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_logprobs": -1,
    "max_num_batched_tokens": 50,
    "max_num_seqs": 3,
    "max_model_len": LENGTH,
    "block_size": BLOCK,
}
QUANTISED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PAGE, NUM_PAGES, NUM_WINDOWS = BLOCK // 8 * 2 * (2 * 512) * 4, 60, 5
"""Bytes of a page, which holds rows of 16 tokens; number of pages; number of groups of layers that keep a window."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model that knows no positions after the last one that the engine serves."""
    return make_compressed(tmp_path_factory.mktemp("deepseek-v4") / "model", max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Iterator[LLM]:
    """An engine whose cache has few pages, so that long requests preempt each other."""
    with engine(model.path, kv_cache_memory_bytes=NUM_PAGES * PAGE, **OPTIONS) as llm:
        yield llm


def test_what_the_reference_depends_on(model: TinyModel, tmp_path: Path) -> None:
    """The choice of entries, the window and the limit of experts each change most logits of a long text."""
    tokens = PROMPTS[-1]
    want = logits_after(model, tokens)
    for name, changes in {
        "choice": {"index_topk": 512},
        "window": {"sliding_window": 512},
        "limit": {"swiglu_limit": 1e9},
    }.items():
        error = np.abs(want - logits_after(make_compressed(tmp_path / name, **changes), tokens)).max(axis=1)
        assert np.median(error[200:]) > 0.01, name


def test_equals_transformers(llm: LLM, model: TinyModel) -> None:
    """Requests in batches, chunks, with prefixes that are found, and preempted."""
    check(llm, model, PROMPTS)
    outputs = generate(llm, PROMPTS[-1:], greedy(12))
    check_equal(model, PROMPTS[-1:], tokens_of(outputs), [12])
    assert all(output.num_cached_tokens for output in outputs), "the prefix cache was not hit"
    assert largest_error(llm, model, PROMPTS[3:]) < 2e-4
    assert NUM_PAGES < NUM_WINDOWS * LENGTH * 8 // BLOCK, "rows of all tokens would fit"
    check(llm, model, random_prompts(152, [LENGTH - 5]), 5)
    check(llm, model, random_prompts(151, [5, 9, 13]), 130)
    assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"


def test_arrivals_and_resets(llm: LLM, model: TinyModel) -> None:
    check_arrivals(llm, model, PROMPTS)


def test_drafts_in_pieces(tmp_path: Path) -> None:
    """Decode rows of several tokens, each with entries of its own; attention works in pieces of one pair; YaRN."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32}
    model = make_compressed(tmp_path / "yarn", rope_parameters=yarn | {"beta_slow": 1})
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    options = OPTIONS | {"speculative_config": drafts, "additional_config": {"attention_memory_gib": 1e-6}}
    with engine(model.path, kv_cache_memory_bytes=100 * PAGE, **options) as llm:
        check(llm, model, PROMPTS[-4:], 20)
        assert metric(llm, "vllm:spec_decode_num_drafts") > 0


@pytest.mark.parametrize("num_queries", [1, 4, 64])
def test_places_of_a_window(num_queries: int) -> None:
    """Positions that a query sees are at their places, whatever the order of pairs; those before are not in the
    table."""
    rng, size, kv_tile, window = np.random.default_rng(2), 16, 64, 24
    firsts = [0, 5, 200, 64, 1000]
    pairs, last = [], torch.full((len(firsts) + 1, num_queries), NEVER, dtype=torch.int32)
    blocks = rng.permutation(1000).reshape(len(firsts), -1)
    for tile, first in enumerate(firsts):
        last[tile] = torch.arange(first, first + num_queries)
        for start in range(max(0, first - window + 1) // kv_tile * kv_tile, first + num_queries, kv_tile):
            pairs.append((tile, start, *blocks[tile, start // size : (start + kv_tile) // size]))
    pairs += [(len(firsts), FAR, 0, 0, 0, 0)]
    table = torch.tensor(rng.permutation(pairs), dtype=torch.int32)
    tile, start = table[:, 0], table[:, 1]
    plan = PairPlan(size, kv_tile, tile, start, table[:, 2:], last[tile] - start.unsqueeze(1), None, [])
    made = KeyTable.of_window(plan, len(last), window)
    assert torch.equal(made.last, last)
    assert made.blocks.shape[1] <= (num_queries + window + 2 * kv_tile) // size
    for tile, first in enumerate(firsts):
        seen = torch.arange(max(0, first - window + 1), first + num_queries, dtype=torch.int32)
        want = blocks[tile, seen // size] * size + seen.numpy() % size
        assert made.entries(seen.expand(len(last), -1))[tile].tolist() == want.tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_caches_that_share_pages(count: int) -> None:
    """Places in the slots of a page are those of whole pages; a block is ``count`` of the plan's."""
    size, rows, slots = 8, 4, 3
    pages = torch.arange(5 * slots * count * size * rows, dtype=torch.float32).view(5, count * size, -1)
    step = CompressedMetadata(0, None, None, None, count)  # type: ignore[arg-type]
    for slot in range(slots):
        got = PageSlot(rows, torch.float32, count * size, slots, slot).rows(pages)
        for block in range(5 * count):
            place = int(step._spread(torch.tensor(block), slots)) * size
            first = ((block // count * slots + slot) * count + block % count) * size * rows
            assert got[place : place + size].flatten().tolist() == list(range(first, first + size * rows))


@pytest.mark.parametrize(("rate", "overlaps"), [(4, True), (4, False), (128, False)])
def test_windows_at_the_end(rate: int, overlaps: bool) -> None:
    """Windows that tokens of a tile do not end have no positions after the last one of the model."""
    last = torch.full((2, 50), NEVER, dtype=torch.int32)
    last[0, :3] = torch.arange(LENGTH - 3, LENGTH)  # The other tile is padding.
    plan: Any = SimpleNamespace(block_size=BLOCK)
    table = KeyTable(torch.tensor([[3, 1, 2]] * 2, dtype=torch.int32), last, plan)
    windows = Windows.of(table, table.entries, rate, overlaps)
    assert windows.position.max() < LENGTH
    ended = windows.position[windows.is_real].tolist(), windows.entry[windows.is_real].tolist()
    assert ended == ([LENGTH - rate], [(3 * BLOCK - rate) // rate])
    assert not windows.entry[~windows.is_real].any()


def test_hyper_connections() -> None:
    """Equal to transformers' modules, with every weight at random."""
    config = hf.DeepseekV4Config(**SIZES)
    torch.manual_seed(0)
    connection, head = (
        getattr(hf.models.deepseek_v4.modeling_deepseek_v4, f"DeepseekV4Hyper{name}")(config)
        for name in ("Connection", "Head")
    )
    for module in (connection, head):
        for name, parameter in module.named_parameters():
            torch.nn.init.zeros_(parameter)
            vary(name, parameter.data)
    streams, output = torch.randn(7, config.hc_mult, config.hidden_size), torch.randn(7, config.hidden_size)
    eps, more = config.rms_norm_eps, config.hc_eps
    with torch.no_grad():
        after, matrix, collapsed = connection(streams.unsqueeze(0))
        weights = connection.fn, connection.scale, connection.base
        got = before_block(streams, *weights, eps, more, more, 2.0, config.hc_sinkhorn_iters)
        for part, want in zip(got, (after[0].unsqueeze(2), matrix[0], collapsed[0]), strict=True):
            torch.testing.assert_close(part, want)
        want = after[0].unsqueeze(2) * output.unsqueeze(1) + matrix[0].transpose(1, 2) @ streams
        torch.testing.assert_close(after_block(output, streams, *got[:2]), want)
        got_head = at_head(streams, head.hc_fn, head.hc_scale, head.hc_base, eps, more)
        torch.testing.assert_close(got_head, head(streams.unsqueeze(0))[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "DeepSeek V4 is not cut over ranks or stages yet"),
        ({"kv_cache_dtype": "fp8"}, "leave out kv_cache_dtype"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "leave out kv_cache_dtype"),
        ({"enable_lora": True}, "leave out enable_lora"),
        ({"enforce_eager": False}, "set enforce_eager=True"),
        ({"enable_prompt_embeds": True}, "leave out enable_prompt_embeds"),
        ({"block_size": 64}, "block_size=64 .* use a multiple of 128"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "drafts by mtp are not supported"),
        ({"hf_overrides": {"compress_rope_theta": 1e4}}, "compress_rope_theta=10000.0, and rope_theta=160000"),
        ({"hf_overrides": {"topk_method": None}}, "served as published, with topk_method=noaux_tc"),
        ({"hf_overrides": {"quantization_config": QUANTISED}}, "use one whose weights are in bfloat16"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, model: TinyModel) -> None:
    options = OPTIONS | options
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(model.path), skip_tokenizer_init=True, **options).create_engine_config()


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("main", {"rope_theta": 20000.0}, "rope_theta=10000.* make them equal"),
        ("compress", {"rope_theta": 10000.0}, "compress_rope_theta=160000.* make them equal"),
        ("main", {"rope_type": "linear", "factor": 2.0}, 'rope_type=linear of layers without entries: use "default"'),
        ("compress", {"rope_type": "linear", "factor": 2.0}, 'rope_type=linear of layers with entries: use "default"'),
        ("compress", {"rope_type": "yarn", "attention_factor": 1.3}, "attention_factor=1.3: set it to 1.0"),
        ("compress", {"rope_type": "yarn"}, "attention_factor=None: set it to 1.0"),
        ("compress", {"rope_type": "yarn", "attention_factor": 1.0}, None),
        ("main", {}, None),
    ],
)
def test_misread_positions(part: str, changes: dict[str, Any], message: str | None) -> None:
    """vLLM passes over parts of nested settings that transformers reads."""
    config = hf.DeepseekV4Config(**SIZES)
    config.rope_parameters[part].update(changes)
    misread = misread_positions(config)
    assert misread is None if message is None else re.search(message, misread or "")
