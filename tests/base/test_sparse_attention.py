"""Sparse attention (DSA) beyond ``index_topk``: tokens and log probabilities equal a reference in float32."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compilations, engine
from safetensors.torch import load_file
from test_latent_attention import LARGEST, check, largest_error, multi_token_prediction, with_indexer
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs

from model_runner_base.attention.choice import Chooser, KeyTable, RoundSize, plan_of_chosen
from model_runner_base.attention.metadata import NEVER, PairPlan
from model_runner_base.attention.plan import FAR
from model_runner_base.step.rounds import MOST_UNROLLED, loops_run_by, unrolled
from model_runner_base.testing.architectures import LATENT_LATER, hf
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import run_with_arrivals, run_with_resets
from model_runner_base.testing.engine import generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import OF_TRANSFORMERS, TinyModel, make_checkpoint, reference_model, vary
from model_runner_base.testing.reference import logits_after
from model_runner_base.vllm_compat.patches.without_indexer import without_weights_of_indexer

KEYS = 16
"""Number of keys that a token sees."""
INDEXER = {"index_topk": KEYS, "index_n_heads": 16, "index_head_dim": 16}
"""An indexer of so many heads that scores are seldom equal: relu makes zeros of many products."""
PROMPTS = random_prompts(120, [1, 5, 15, 16, 17, 33, 64, 90, 130])
NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {"enforce_eager": True, "max_logprobs": -1, "max_num_batched_tokens": 24, "max_num_seqs": 3}
"""Chunks of 24 tokens at most, which begin and end anywhere in blocks and tiles."""
BLOCK = 16 * 2 * (24 + 8 + 16) * 4
"""Bytes of a block: two layers keep a latent, a rotary key and an indexer's key of each of 16 tokens."""


def indexed(path: Path, count: int) -> TinyModel:
    """A checkpoint of DeepSeek V3 with an indexer that leaves ``count`` keys, as one of V3.2.

    Transformers has the class in one lane alone; in the other the reference is V3's, to which indexers are added.
    """
    dense = make_checkpoint("deepseek-v3", path)
    torch.manual_seed(1)
    model = with_indexer(dense, path / f"v3.2-{count}", INDEXER | {"index_topk": count})
    if not hasattr(hf, "DeepseekV32ForCausalLM"):
        (own := model.path / OF_TRANSFORMERS).mkdir()
        (own / "model.safetensors").symlink_to(model.path / "model.safetensors")
        config = json.loads((model.path / "config.json").read_text())
        named = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        (own / "config.json").write_text(json.dumps(config | named))
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sparse")


@pytest.fixture(scope="module")
def deepseek(directory: Path) -> TinyModel:
    return indexed(directory, KEYS)


@pytest.fixture(scope="module")
def served(deepseek: TinyModel) -> Iterator[LLM]:
    """An engine whose cache holds some 400 tokens, so that three long requests preempt each other."""
    with engine(deepseek.path, **OPTIONS, block_size=16, kv_cache_memory_bytes=26 * BLOCK, max_model_len=256) as llm:
        yield llm


def test_reference_hides_keys(deepseek: TinyModel, directory: Path) -> None:
    """The reference differs from one of all keys after ``KEYS`` tokens, and not before."""
    tokens = PROMPTS[-1]
    sparse, dense = logits_after(deepseek, tokens), logits_after(indexed(directory, 256), tokens)
    error = np.abs(sparse - dense).max(axis=1)
    assert error[:KEYS].max() < 1e-4 and np.median(error[KEYS:]) > 0.1


def check_batches(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> None:
    """Compares requests in batches, chunks, with prefixes that are found, and preempted."""
    check(llm, model, prompts, count)
    outputs = generate(llm, prompts[-1:], greedy(count))
    check_equal(model, prompts[-1:], tokens_of(outputs), [count])
    assert all(output.num_cached_tokens for output in outputs), "the prefix cache was not hit"
    assert largest_error(llm, model, prompts[3:]) < 2e-4
    check(llm, model, random_prompts(121, [120, 125, 130]), 30)
    assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"


def check_arrivals(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> None:
    """Compares requests that arrive at any step, some of which are aborted, or all preempted every 30 steps."""
    rng = np.random.default_rng(4)
    counts = rng.integers(1, count + 1, len(prompts)).tolist()
    check_equal(model, prompts, run_with_arrivals(llm, prompts, counts, rng), counts)
    check_equal(model, prompts[-4:], run_with_resets(llm, prompts[-4:], count), [count] * 4)


def test_equals_reference(served: LLM, deepseek: TinyModel) -> None:
    check_batches(served, deepseek, PROMPTS)


def test_arrivals_and_resets(served: LLM, deepseek: TinyModel) -> None:
    check_arrivals(served, deepseek, PROMPTS)


@pytest.mark.newest
def test_prompt_lookup(deepseek: TinyModel) -> None:
    """Decode rows of several tokens each, which verify drafts; each token has keys of its own."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    with engine(deepseek.path, **OPTIONS, speculative_config=drafts) as llm:
        check(llm, deepseek, PROMPTS, 30)
        assert metric(llm, "vllm:spec_decode_num_drafts") > 0


@pytest.mark.newest
def test_a_length_that_is_fitted(directory: Path) -> None:
    """vLLM lowers ``max_model_len=-1`` to what fits, after the model is made with its indexer, which stays."""
    model = indexed(directory, 200)
    with engine(model.path, **OPTIONS, block_size=16, kv_cache_memory_bytes=9 * BLOCK, max_model_len=-1) as llm:
        assert llm.llm_engine.model_config.max_model_len < 200
        check(llm, model, PROMPTS[:-2], NEW_TOKENS)
        # What a reload would take.
        stored, runner = load_file(model.path / "model.safetensors"), runner_of(llm)
        taken = without_weights_of_indexer(runner.model_config, runner.model, stored.items())
        assert dict(taken).keys() == stored.keys()


@pytest.mark.newest
def test_shared_choices_and_drafts(tmp_path: Path) -> None:
    """GLM-5, whose second layer takes the first one's choice; its own further layer drafts, with an indexer of its
    own. Attention works in pieces of one pair."""
    torch.manual_seed(2)
    config = LATENT_LATER["glm-5"]()
    sharing = {"index_topk_freq": 2, "index_skip_topk_offset": 1, "indexer_types": ["full", "shared", "full"]}
    config.update(INDEXER | sharing | {"num_hidden_layers": 3, "indexer_rope_interleave": True})
    config.mlp_layer_types, config.layer_types = ["dense", "sparse", "sparse"], ["indexed_attention"] * 3
    glm = AutoModelForCausalLM.from_config(config)
    for name, parameter in glm.named_parameters():
        vary(name, parameter)
    glm.save_pretrained(tmp_path / "glm")
    model = multi_token_prediction(TinyModel(tmp_path / "glm"), tmp_path / "drafting")
    assert sum(name.endswith(".indexer") for name, _ in reference_model(model.path).named_modules()) == 2
    options = OPTIONS | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    with engine(model.path, **options, additional_config={"attention_memory_gib": 1e-6}) as llm:
        check(llm, model, PROMPTS, 30)
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


@pytest.mark.openxla
def test_compiled(deepseek: TinyModel) -> None:
    """The same tokens by graphs, also with attention in pieces of one pair, and no compilation after warm-up."""
    config = LARGEST | {"attention_memory_gib": 1e-6}
    options = OPTIONS | {"enforce_eager": False, "max_model_len": 160, "max_num_seqs": 2}
    with engine(deepseek.path, **options, additional_config=config) as llm:
        before = compilations()
        check(llm, deepseek, PROMPTS[2:], NEW_TOKENS)
        assert compilations() == before


@pytest.mark.newest
def test_a_config_that_vllm_reads_otherwise(tmp_path: Path) -> None:
    """GLM-5's indexers rotate neighbouring numbers, which vLLM has to be told."""
    LATENT_LATER["glm-5"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GlmMoeDsaForCausalLM"]}))
    with pytest.raises(ValueError, match="indexer_rope_interleave, which published code has as True"):
        EngineArgs(str(tmp_path), max_model_len=257, hf_overrides={"index_topk": 256}).create_engine_config()


def plan_of(lengths: list[int], block: int = 4, tile: int = 8) -> tuple[PairPlan, list[np.ndarray]]:
    """A plan of decode rows, its pairs in random order before three of padding; and each row's cache entries."""
    rng = np.random.default_rng(0)
    pairs = [(row, start) for row, length in enumerate(lengths) for start in range(0, length, tile)]
    rng.shuffle(pairs)
    count = max(lengths) // tile * tile // block + tile
    blocks = rng.permutation(np.arange(1, len(lengths) * count + 1)).reshape(len(lengths), count)
    padded = [*pairs, *[(0, FAR)] * 3]
    own = [blocks[row, start // block % count :][: tile // block] if start != FAR else [0, 0] for row, start in padded]
    rows, starts = (torch.tensor(part, dtype=torch.int32) for part in zip(*padded, strict=True))
    last = torch.tensor(lengths, dtype=torch.int32)[rows] - 1 - starts
    plan = PairPlan(
        block, tile, rows, starts, torch.tensor(np.array(own), dtype=torch.int32), last.view(-1, 1), None, []
    )
    return plan, [(row[:, None] * block + np.arange(block)).flatten() for row in blocks]


@pytest.mark.parametrize(("piece", "is_traced"), [(0, False), (1, False), (8, False), (1, True)])
def test_chosen_keys_are_the_best(piece: int, is_traced: bool) -> None:
    """The best positions of each row, whatever lies in places that no row sees; equal scores are counted, too. Rounds
    are of all rows, of one, of four where six are no multiple, and those of graphs that hold each."""
    lengths = [3, 40, 0, 17, 16, 100]
    plan, entries = plan_of(lengths)
    plan.piece = piece
    generator = torch.Generator().manual_seed(0)
    cache = torch.full((400, 4, 1, 6), float("nan"))
    for length, own in zip(lengths, entries, strict=True):
        cache.flatten(0, 1)[own[:length]] = torch.randn((length, 1, 6), generator=generator)
    cache.flatten(0, 1)[entries[5][20:60]] = 0.0  # Equal scores.
    queries, weights = (torch.randn(shape, generator=generator) for shape in ((6, 1, 2, 6), (6, 1, 2)))
    table = KeyTable.of(plan, 6, 128)
    assert table.last.flatten().tolist() == [length - 1 if length else NEVER for length in lengths]
    with loops_run_by(unrolled) if is_traced else nullcontext():
        positions = Chooser(KEYS).choose(table, queries, weights, cache)
    chosen = plan_of_chosen(table, positions)
    for row, (length, own) in enumerate(zip(lengths, entries, strict=True)):
        keys = cache.flatten(0, 2)[own[:length]]
        scores = weights[row, 0] @ torch.relu(queries[row, 0] @ keys.T)
        got = positions[row, 0].tolist()
        assert len(set(got)) == KEYS
        if length > KEYS:
            assert torch.equal(scores[got].sort().values, scores.topk(KEYS).values.sort().values)
        pairs = ((chosen.pair_tile == row) & (chosen.last[:, 0] >= 0)).nonzero().flatten()
        seen = [chosen.pair_blocks[pair, : chosen.last[pair, 0] + 1].tolist() for pair in pairs]  # type: ignore[index]
        want = [own[position] for position in got if position < length]
        assert sorted(entry for part in seen for entry in part[: chosen.kv_tile]) == sorted(want)
    is_pair = chosen.pair_start != FAR
    assert is_pair.tolist() == sorted(is_pair.tolist(), reverse=True), "padding comes last"


def test_fewer_positions_than_are_chosen() -> None:
    """A table that is shorter than the number of chosen keys, as where vLLM has lowered ``max_model_len`` to what fits.
    A graph scores there, too: no token sees places after the table."""
    plan, entries = plan_of([3, 8])
    table = KeyTable.of(plan, 2, 8)
    assert table.blocks.shape[1] * plan.block_size < KEYS
    cache, queries, weights = torch.randn(400, 4, 1, 6), torch.randn(2, 1, 2, 6), torch.randn(2, 1, 2)
    with loops_run_by(unrolled):
        positions = Chooser(KEYS).choose(table, queries, weights, cache)
    assert positions.tolist() == [[[*range(KEYS)]]] * 2
    chosen = plan_of_chosen(table, positions)
    for row, length in enumerate([3, 8]):
        (pair,) = ((chosen.pair_tile == row) & (chosen.last[:, 0] >= 0)).nonzero().flatten()
        assert chosen.last[pair].tolist() == [length - 1]
        assert chosen.pair_blocks[pair, :length].tolist() == entries[row][:length].tolist()  # type: ignore[index]


@pytest.mark.parametrize("num_tiles", [1, 7, 16, 17, 40, 1000])
@pytest.mark.parametrize("longest", [100, 2049, 163840])
def test_graphs_that_hold_each_round_have_few(num_tiles: int, longest: int) -> None:
    """Rounds are larger there, so that no graph has more than ``MOST_UNROLLED``; elsewhere they are as they were."""
    for num_queries, piece in [(1, 0), (1, 4), (64, 100)]:
        small, large = (RoundSize.of(2048, num_tiles, num_queries, longest, 64, piece, each) for each in (False, True))
        groups, parts = -(-num_tiles // large.tiles), -(-longest // large.positions)
        assert groups * parts <= MOST_UNROLLED
        assert large.positions % 64 == 0 and large.tiles >= small.tiles and large.positions >= small.positions == 2048
