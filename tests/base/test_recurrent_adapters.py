"""LoRA adapters of models with recurrent layers: tokens of the model with the adapter merged into its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import engine
from test_lora import LORA, check

from model_runner_base.testing.adapters import ATTENTION, TinyAdapter, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import KnownDrafts, speculation
from model_runner_base.testing.engine import generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.recurrent_architectures import RECURRENT

PROJECTIONS = {
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate", "gate"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "lfm2": ("in_proj", "out_proj", "w1", "w2", "w3"),
    "falcon-h1": ("in_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),
    "granite-hybrid": ("in_proj", "out_proj", "input_linear", "output_linear"),
    "jamba": ("in_proj", "x_proj", "dt_proj", "out_proj"),
}
"""Matrices of recurrent layers, and of MLPs, by model; attention's come in addition."""


IN_BOTH_LANES = ("lfm2", "qwen3_5")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.once] * (name not in IN_BOTH_LANES))
        for name in PROJECTIONS
        if name in RECURRENT
    ],
)
def test_adapters(name: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Two adapters and none in one batch: of all projections, and of the recurrent layers' alone."""
    model, projections = tiny_model(name), PROJECTIONS[name]
    adapters = [
        make_adapter(model.path, tmp_path, 1, targets=(*ATTENTION, *projections)),
        make_adapter(model.path, tmp_path, 2, rank=4, targets=projections),
    ]
    with engine(model.path, **LORA, enforce_eager=True) as llm:
        check(llm, model, adapters)


def test_prefixes_of_adapters(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """A prompt is computed anew under another adapter, and hit under its own, also with others in the batch.

    A state of another adapter would give a user tokens of a model that was not asked for.
    """
    name = "qwen3_5" if "qwen3_5" in RECURRENT else "lfm2"
    model, projections = tiny_model(name), PROJECTIONS[name]
    one, other = (make_adapter(model.path, tmp_path, number, targets=projections) for number in (1, 2))
    prefix, *ends = random_prompts(110, [48, 3, 9, 20])
    users: list[TinyAdapter | None] = [None, one, other]
    with engine(model.path, **LORA, enforce_eager=True, enable_prefix_caching=True, block_size=16) as llm:

        def ask(prompts: list[tuple[int, ...]], adapters: list[TinyAdapter | None]) -> list[int]:
            requests = [adapter and adapter.request for adapter in adapters]
            outputs = generate(llm, prompts, greedy(8), requests)
            merged = [adapter.merged if adapter else model for adapter in adapters]
            want = [model.greedy(prompt, 8) for model, prompt in zip(merged, prompts, strict=True)]
            assert tokens_of(outputs) == want
            return [output.num_cached_tokens or 0 for output in outputs]

        for user in users:
            assert ask([prefix + ends[0]], [user]) == [0]
        assert ask([prefix + end for end in ends], users) == [48] * 3
        # An adapter of another name in the slot of the first is not the first.
        third = make_adapter(model.path, tmp_path, 3, targets=projections)
        assert ask([prefix + ends[0]] * 2, [third, other]) == [0, 48]
        assert ask([prefix + ends[0]] * 2, [third, one]) == [48] * 2


def test_drafts_of_adapters(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, often wrong, of requests with two adapters and none in one batch, whose prefixes are kept as well."""
    name = "qwen3_5" if "qwen3_5" in RECURRENT else "lfm2"
    model, projections = tiny_model(name), PROJECTIONS[name]
    one, other = (make_adapter(model.path, tmp_path, number, targets=projections) for number in (1, 2))
    prompts, count = random_prompts(114, [17, 40, 70]), 20
    models = [model, one.merged, other.merged]
    options = LORA | {"enforce_eager": True, "enable_prefix_caching": True, "block_size": 16}
    with engine(model.path, **options, speculative_config=speculation("ngram", model)) as llm:
        known = [KnownDrafts(llm, each, {prompt: count}, False) for each, prompt in zip(models, prompts, strict=True)]

        def look_up(*args: Any) -> list[list[int]]:
            return [max(drafts, key=len) for drafts in zip(*(each.look_up(*args) for each in known), strict=True)]

        monkeypatch.setattr(runner_of(llm).parts.drafter, "look_up", look_up)
        for hits in ([0, 0, 0], [16, 32, 64]):
            outputs = generate(llm, prompts, greedy(count), [None, one.request, other.request])
            wanted = [each.greedy(prompt, count) for each, prompt in zip(models, prompts, strict=True)]
            assert tokens_of(outputs) == wanted
            assert [output.num_cached_tokens for output in outputs] == hits
        drafted, accepted = (metric(llm, f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
        assert drafted > accepted > 0, "drafts were all right, or all wrong"
