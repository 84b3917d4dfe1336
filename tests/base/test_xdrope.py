"""XD-RoPE: HunYuan-VL, whose tokens are rotated by four positions each, against what transformers made of it once."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compilations, engine
from hunyuan import BEGIN, COUNT, IMAGE, PROMPTS, RECORDED, TOKEN_BYTES, make_hunyuan, pictures
from vllm import LLM
from vllm.model_executor.models.hunyuan_vision import HunYuanVLForConditionalGeneration
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from model_runner_base.inputs.multimodal.positions import calc_xdrope_positions
from model_runner_base.testing.engine import greedy, metric

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "max_num_batched_tokens": 24, "max_model_len": 128}
FEW = {"num_batched_tokens_buckets": [24], "num_seqs_buckets": [4], "context_length_buckets": [128]}
COMPILED = {"additional_config": {"neuron_config": FEW}}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hunyuan(tmp_path_factory.mktemp("hunyuan"))


def ask(llm: LLM, indices: list[int]) -> list[dict[str, list[int]]]:
    inputs: list[Any] = [{"prompt_token_ids": PROMPTS[index][0]} for index in indices]
    for index, prompt in zip(indices, inputs, strict=True):
        if PROMPTS[index][1]:
            prompt["multi_modal_data"] = {"image": pictures(index)}
    outputs = llm.generate(inputs, greedy(COUNT), use_tqdm=False)
    return [
        {"prompt": list(each.prompt_token_ids or ()), "tokens": list(each.outputs[0].token_ids)} for each in outputs
    ]


@pytest.mark.parametrize("options", [{"enforce_eager": True}, COMPILED], ids=["eager", "compiled"])
def test_tokens_are_those_recorded(options: dict[str, Any], path: Path) -> None:
    """Prompts with one image, several, none, and text before and after, come in one batch cut by chunks; then with
    cached prefixes."""
    recorded = json.loads(RECORDED.read_text())
    with engine(path, **OPTIONS, **options) as llm:
        warm = compilations()
        assert ask(llm, [0, 1, 2, 3]) == recorded
        assert ask(llm, [3, 2, 1, 0]) == recorded[::-1]
        assert metric(llm, "vllm:prefix_cache_hits") > 0
        for index, expected in enumerate(recorded):
            assert ask(llm, [index]) == [expected]
        assert compilations() == warm


def test_preempted_requests_with_drafts(path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    few = {"kv_cache_memory_bytes": 144 * TOKEN_BYTES, "enable_prefix_caching": False}
    with engine(path, **OPTIONS, **few, enforce_eager=True, speculative_config=LOOKUP) as llm:
        assert ask(llm, [3, 1, 0, 1, 3]) == [recorded[index] for index in (3, 1, 0, 1, 3)]
        assert metric(llm, "vllm:num_preemptions") > 0
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0


def test_a_token_that_begins_images_need_not_begin_one(path: Path) -> None:
    """A text may have the token that begins images without an image; the image of another request is where it was."""
    recorded = json.loads(RECORDED.read_text())
    with engine(path, **OPTIONS, enforce_eager=True) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [5, BEGIN, 7, BEGIN]}], greedy(4), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
        assert ask(llm, [0]) == recorded[:1]


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_positions_are_vllms(index: int) -> None:
    """Positions are vLLM's for images that lie after the token that begins one, which vLLM goes by."""
    tokens, sizes = json.loads(RECORDED.read_text())[index]["prompt"], PROMPTS[index][1]
    begins = [place + 1 for place, token in enumerate(tokens) if token == BEGIN]
    items: list[Any] = []
    for begin, (width, height) in zip(begins, sizes, strict=True):
        grid = SimpleNamespace(data=torch.tensor([1, height // 4, width // 4]))
        length = next(place for place in range(begin, len(tokens) + 1) if [*tokens, 0][place] != IMAGE) - begin
        place = PlaceholderRange(begin, length)
        items.append(MultiModalFeatureSpec({"image_grid_thw": grid}, "image", str(begin), place))  # type: ignore[arg-type]
    sections = {"xdrope_section": [2, 2, 2, 2]}
    vision = SimpleNamespace(spatial_merge_size=2)
    config = SimpleNamespace(image_start_token_id=BEGIN, vision_config=vision, rope_scaling=sections)
    model: Any = SimpleNamespace(config=config)
    expected = HunYuanVLForConditionalGeneration.get_xdrope_input_positions(model, tokens, items)
    offsets, behind = calc_xdrope_positions(model, 4, len(tokens), items)
    assert (offsets + np.arange(len(tokens))).tolist() == expected.tolist() and behind == 0
