"""Attention to chosen blocks (MiniMax M3): tokens and log probabilities equal transformers in float32."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED_MODEL, engine
from safetensors.torch import load_file, save_file
from test_latent_attention import check, largest_error
from test_sparse_attention import check_arrivals, check_batches, plan_of
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs

from model_runner_base.attention.block_choice import BlockChooser
from model_runner_base.attention.plan import FAR
from model_runner_base.errors import CheckpointError
from model_runner_base.step.rounds import loops_run_by, unrolled
from model_runner_base.testing.block_sparse_models import BLOCK, COUNT, NUM_EXPERTS, NUM_LAYERS, make_block_sparse
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import metric
from model_runner_base.testing.half_precision import Half
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import logits_after

pytestmark = pytest.mark.newest
PROMPTS = random_prompts(130, [1, 5, 15, 16, 17, 33, 48, 49, 64, 90, 130, 200])
NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {"enforce_eager": True, "max_logprobs": -1, "max_num_batched_tokens": 24, "max_num_seqs": 4}
"""Chunks of 24 tokens at most, which begin and end anywhere in blocks and tiles."""
BLOCK_BYTES = 16 * (NUM_LAYERS * 2 * 2 + NUM_LAYERS - 1) * 16 * 4
"""Bytes of a cache block: keys and values of two heads in each layer, and indexers' keys."""
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_block_sparse(tmp_path_factory.mktemp("m3"))


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Iterator[LLM]:
    """An engine whose cache holds some 400 tokens, so that long requests preempt each other."""
    memory = 26 * BLOCK_BYTES
    with engine(model.path, max_model_len=256, block_size=16, kv_cache_memory_bytes=memory, **OPTIONS) as llm:
        yield llm


def test_reference_leaves_blocks_out(model: TinyModel, tmp_path: Path) -> None:
    """The reference differs from one of all blocks after ``BLOCK * COUNT`` tokens, and not before."""
    tokens = PROMPTS[-1]
    error = np.abs(logits_after(model, tokens) - logits_after(make_block_sparse(tmp_path, 100), tokens)).max(axis=1)
    assert error[: BLOCK * COUNT].max() < 1e-4 and np.median(error[BLOCK * COUNT :]) > 0.1


def test_equals_transformers(llm: LLM, model: TinyModel) -> None:
    check_batches(llm, model, PROMPTS)
    assert largest_error(llm, model, PROMPTS[:3]) < 2e-4


def test_arrivals_and_resets(llm: LLM, model: TinyModel) -> None:
    check_arrivals(llm, model, PROMPTS)


def test_drafts_in_pieces(model: TinyModel) -> None:
    """Decode rows of several tokens, each with blocks of its own; attention works in pieces of one pair, without those
    that have no chosen block."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    pieces = {"attention_memory_gib": 1e-6}
    with engine(model.path, max_model_len=256, **OPTIONS, speculative_config=drafts, additional_config=pieces) as llm:
        check(llm, model, PROMPTS, 30)
        assert metric(llm, "vllm:spec_decode_num_drafts") > 0


def test_text_alone(model: TinyModel, tmp_path: Path) -> None:
    """A published checkpoint, whose class has a tower, serves text where images are ruled out."""
    config = json.loads((model.path / "config.json").read_text())
    config |= {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "vision_config": TOWER}
    (tmp_path / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    tensors = load_file(model.path / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for file in BUNDLED_MODEL.glob("*token*"):
        (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ValueError, match="images of MiniMax M3 are not supported yet"):
        EngineArgs(str(tmp_path), max_model_len=256).create_engine_config()
    limits = {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}, "skip_tokenizer_init": False}
    with engine(tmp_path, max_model_len=256, **OPTIONS, **limits) as llm:
        check(llm, model, PROMPTS[-4:], NEW_TOKENS)


def test_an_indexer_without_weights(model: TinyModel, tmp_path: Path) -> None:
    """vLLM would choose blocks by what is in memory."""
    tensors = load_file(model.path / "model.safetensors")
    others = {name: tensor for name, tensor in tensors.items() if not name.endswith("1.self_attn.index_k_proj.weight")}
    assert len(others) == len(tensors) - 1
    save_file(others, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(model.path / "config.json")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.index_k_proj\.weight is missing"):
        engine(tmp_path, max_model_len=64, **OPTIONS).__enter__()


@pytest.mark.parametrize(
    ("piece", "how", "size"),
    [
        *((piece, "eager", size) for piece in (0, 1, 8) for size in (4, 6, 16)),
        *((1, "unrolled", size) for size in (4, 6, 16)),
        (8, "aot_eager", 6),
    ],
)
def test_chosen_blocks_are_the_best(piece: int, how: str, size: int) -> None:
    """The best blocks of each head of each row, with the first and the last two; whatever lies in places that no row
    sees. Blocks are smaller than a KV tile of 8, larger, or of another size. Scores are no wider than the plan's rows:
    those of ``max_model_len`` would take terabytes."""
    lengths = [3, 40, 0, 17, 16, 100]
    plan, entries = plan_of(lengths)
    plan.piece = piece
    generator = torch.Generator().manual_seed(0)
    cache = torch.full((400, 4, 1, 6), float("nan"))
    for length, own in zip(lengths, entries, strict=True):
        cache.flatten(0, 1)[own[:length]] = torch.randn((length, 1, 6), generator=generator)
    queries = torch.randn((6, 1, 2, 6), generator=generator)
    chooser = BlockChooser(size, 4, num_first=1, num_last=2, max_model_len=1 << 50)
    choose = chooser.plan_of_chosen
    if how == "aot_eager":
        choose = torch.compile(choose, backend=how, fullgraph=True, dynamic=False)
    with loops_run_by(unrolled) if how == "unrolled" else nullcontext():
        new = choose(plan, queries, cache)
    assert new.chosen is not None
    for row, (length, own) in enumerate(zip(lengths, entries, strict=True)):
        is_own = (new.pair_tile == row) & (new.last[:, 0] >= 0)
        kept = new.pair_start[is_own]  # type: ignore[index]
        seen = chooser.is_chosen(new)[is_own, 0]
        for head in range(2):
            scores = cache.flatten(0, 2)[own[:length]] @ queries[row, 0, head]
            of_blocks = [float(scores[start : start + size].max()) for start in range(0, length, size)]
            numbers = range(len(of_blocks))
            always = {0, len(numbers) - 1, len(numbers) - 2} & {*numbers}
            others = sorted({*numbers} - always, key=of_blocks.__getitem__, reverse=True)
            want = always | {*others[: 4 - len(always)]}
            assert {*new.chosen[row, 0, head].tolist()} - {-1} == want
            places = zip(kept.tolist(), seen[:, head].tolist(), strict=True)
            got = {start + key for start, keys in places for key, is_seen in enumerate(keys) if is_seen}
            positions = {block * size + place for block in want for place in range(size)}
            assert {position for position in got if position < length} == {each for each in positions if each < length}
    if piece:
        is_pair = new.pair_start != FAR
        assert is_pair.tolist() == sorted(is_pair.tolist(), reverse=True), "padding comes last"
        assert is_pair.sum() < (plan.pair_start != FAR).sum()


def test_short_rows_of_a_graph_are_not_scored() -> None:
    """A graph of few pairs takes no scores: its rows see no more blocks than are chosen."""
    plan, _ = plan_of([3, 20, 9])  # 9 pairs of 8 positions, of which 3 are padding.
    nothing = torch.empty(0)
    with loops_run_by(unrolled):
        assert BlockChooser(8, 9, 0, 1, 256).plan_of_chosen(plan, nothing, nothing) is plan
        assert BlockChooser(8, 8, 0, 1, 64).plan_of_chosen(plan, nothing, nothing) is plan
        with pytest.raises(ValueError, match="unpack"):  # Blocks are scored, of no queries.
            BlockChooser(8, 8, 0, 1, 256).plan_of_chosen(plan, nothing, nothing)


def test_bfloat16(tmp_path: Path) -> None:
    """Values are as near to float32 as those of transformers. All experts run: rounding may turn a choice of some."""
    model = make_block_sparse(tmp_path, experts_per_token=NUM_EXPERTS)
    prompts = random_prompts(33, [5, 30, 70, 120, 200])
    with engine(model.path, max_model_len=256, **OPTIONS | {"max_num_batched_tokens": 64}, dtype="bfloat16") as llm:
        Half.run(llm, model, prompts, "bfloat16").check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "not cut into stages"),
        ({"kv_cache_dtype": "fp8"}, "leave out kv_cache_dtype"),
        ({"kv_offloading_size": 1}, "leave out kv_transfer_config"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "drafts by mtp"),
        ({"hf_overrides": {"text_config": {"qk_norm_type": "per_layer"}}}, "passes over qk_norm_type"),
        ({"hf_overrides": {"text_config": {"index_block_size": 64}}}, "passes over index_block_size"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, model: TinyModel) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(model.path), skip_tokenizer_init=True, max_model_len=256, **options).create_engine_config()
