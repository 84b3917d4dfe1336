"""XD-RoPE: HunYuan-VL, whose tokens are rotated by four positions each, against what transformers made of it once."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import compilations, engine
from hunyuan import COUNT, PROMPTS, RECORDED, make_hunyuan, pictures
from vllm import LLM

from model_runner_base.testing.engine import greedy

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 24,
    "limit_mm_per_prompt": {"image": 2},
}
FEW = {"num_batched_tokens_buckets": [24], "num_seqs_buckets": [4], "context_length_buckets": [128]}
COMPILED = {"additional_config": {"neuron_config": FEW}, "max_model_len": 128}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hunyuan(tmp_path_factory.mktemp("hunyuan"))


def ask(llm: LLM, indices: list[int]) -> list[dict[str, list[int]]]:
    inputs: Any = [
        {"prompt_token_ids": PROMPTS[index][0], "multi_modal_data": {"image": pictures(index)}}
        if PROMPTS[index][1]
        else {"prompt_token_ids": PROMPTS[index][0]}
        for index in indices
    ]
    outputs = llm.generate(inputs, greedy(COUNT), use_tqdm=False)
    return [{"prompt": list(each.prompt_token_ids), "tokens": list(each.outputs[0].token_ids)} for each in outputs]


@pytest.mark.parametrize("options", [{"enforce_eager": True}, COMPILED], ids=["eager", "compiled"])
def test_tokens_are_those_of_transformers(options: dict[str, Any], path: Path) -> None:
    """One image, several, none, and text before and after, in one batch cut by chunks; then with a cached prefix each.

    A prompt of text alone is rotated by the same position in all dimensions, which a request keeps while it decodes.
    """
    recorded = json.loads(RECORDED.read_text())
    with engine(path, **OPTIONS, **options) as llm:
        warm = compilations()
        assert ask(llm, [0, 1, 2, 3]) == recorded
        assert ask(llm, [3, 2, 1, 0]) == recorded[::-1]
        for index, expected in enumerate(recorded):
            assert ask(llm, [index]) == [expected]
        assert compilations() == warm
