"""HunYuan-VL where vLLM runs it by its Transformers backend: tokens are rotated by four positions each."""

from pathlib import Path
from typing import Any

import pytest
from conftest import engine
from hunyuan import COUNT, PROMPTS, add_processor, continued, make_hunyuan, pictures
from lane import HAS_OPENXLA

from model_runner_base.testing.engine import greedy


@pytest.mark.skipif(HAS_OPENXLA, reason="this release of vLLM has a class of its own, which test_xdrope.py runs")
def test_tokens_are_the_references(tmp_path: Path) -> None:
    """Prompts with one image, several and none come in one batch cut by chunks, then with cached prefixes."""
    path = make_hunyuan(tmp_path)
    want = continued(path)  # Before the engine, which changes classes of transformers.
    add_processor(path)
    inputs: list[Any] = [
        {"prompt_token_ids": prompt} | ({"multi_modal_data": {"image": pictures(index)}} if sizes else {})
        for index, (prompt, sizes) in enumerate(PROMPTS)
    ]
    options = {"skip_tokenizer_init": False, "max_num_batched_tokens": 24, "max_model_len": 128, "enforce_eager": True}
    with engine(path, **options) as llm:
        for order in (1, -1):
            outputs = llm.generate(inputs[::order], greedy(COUNT), use_tqdm=False)
            got = [
                {"prompt": [*(out.prompt_token_ids or ())], "tokens": [*out.outputs[0].token_ids]} for out in outputs
            ]
            assert got == want[::order]
