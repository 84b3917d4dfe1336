"""Drafts for models with recurrent layers: whatever is drafted, a request's tokens are HF transformers' in float32."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compilations, engine
from safetensors.torch import load_file, save_file
from test_recurrent_models import KINDS, spoil
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import run_with_arrivals, run_with_resets
from model_runner_base.testing.checks.test_multimodal import ask, expected, prompts, read
from model_runner_base.testing.drafts import KnownDrafts, speculation
from model_runner_base.testing.engine import core_of, generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.images import FAMILIES, SeeingModel, make_seeing_model
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.recurrent_architectures import RECURRENT

Tiny = Callable[[str], TinyModel]
PROMPTS = random_prompts(120, [1, 2, 3, 5, 16, 33, 64, 90, 130])
LONG = random_prompts(121, [60, 70, 50])
"""Prompts of requests that preempt each other, with this many tokens each:"""
LONG_OUTPUTS = 50
NEW_TOKENS = 20
OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 4 << 20,
    "enforce_eager": True,
    "block_size": 16,
    "num_gpu_blocks_override": 18,
    "max_model_len": 256,
}
"""The cache has 17 blocks: three long requests preempt."""
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
PREEMPTED = "vllm:num_preemptions"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.once] * (name in ("mamba", "granite-hybrid"))) for name in KINDS],
)
def served(request: pytest.FixtureRequest, tiny_model: Tiny) -> Iterator[tuple[LLM, TinyModel]]:
    """An engine of each kind of recurrent layer."""
    model = tiny_model(request.param)
    with engine(model.path, **OPTIONS, speculative_config=speculation("ngram", model)) as llm:
        yield llm, model


@pytest.mark.parametrize("drafts", ["prompt lookup", "often wrong", "all wrong"])
def test_wrong_drafts_leave_no_trace(
    drafts: str, served: tuple[LLM, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text does not change with drafts: of requests alone, among chunks of prompts, aborted ones, or preempted."""
    llm, model = served
    if drafts != "prompt lookup":
        counts = dict.fromkeys(PROMPTS, NEW_TOKENS) | dict.fromkeys(LONG, LONG_OUTPUTS)
        known = KnownDrafts(llm, model, counts, is_wrong=drafts == "all wrong")
        monkeypatch.setattr(runner_of(llm).parts.drafter, "look_up", known.look_up)
    before = {name: metric(llm, name) for name in (DRAFTED, ACCEPTED, PREEMPTED)}
    spoil(llm)
    for prompt in PROMPTS[:3]:
        check(llm, model, [prompt])
    check(llm, model, PROMPTS)
    rng = np.random.default_rng(122)
    lengths = rng.integers(1, NEW_TOKENS + 1, len(PROMPTS)).tolist()
    check_equal(model, PROMPTS, run_with_arrivals(llm, PROMPTS, lengths, rng), lengths)
    check(llm, model, LONG, LONG_OUTPUTS)
    drafted, accepted, preempted = (metric(llm, name) - count for name, count in before.items())
    assert preempted > 0 or not runner_of(llm).get_kv_cache_spec(), "nothing was preempted"
    assert accepted < drafted, "no draft was wrong"
    assert (accepted > 0) == (drafts == "often wrong") or drafts == "prompt lookup"


def check(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> None:
    check_equal(model, prompts, tokens_of(generate(llm, prompts, greedy(count))), [count] * len(prompts))


def multi_token_prediction(model: TinyModel | SeeingModel, path: Path, text: str = "model.") -> Path:
    """A checkpoint with a further layer that drafts, the last one once more.

    Layers add little to a token's embedding, so that this layer, which gets that and a state, is often right.
    """
    weights, config = load_file(model.path / "model.safetensors"), json.loads((model.path / "config.json").read_text())
    weights = {
        name: 0.03 * w if name.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj")) else w
        for name, w in weights.items()
    }
    text_config = config.get("text_config", config)
    last, size = f"{text}layers.{text_config['num_hidden_layers'] - 1}.", text_config["hidden_size"]
    own = {f"mtp.layers.0.{name.removeprefix(last)}": w for name, w in weights.items() if name.startswith(last)}
    # Norms multiply by one more than their weights.
    own |= {f"mtp.pre_fc_norm_{name}.weight": torch.zeros(size) for name in ("hidden", "embedding")}
    own |= {"mtp.norm.weight": weights[f"{text}norm.weight"]}
    own |= {"mtp.fc.weight": torch.cat((torch.eye(size), 0.03 * torch.eye(size)), dim=1)}
    copytree(model.path, path)
    save_file(weights | {name: w.clone() for name, w in own.items()}, path / "model.safetensors", {"format": "pt"})
    text_config |= {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


WITH_DRAFTS = [pytest.param("qwen3-next", True, marks=pytest.mark.once), ("qwen3_5", True), ("qwen3_5-moe", False)]


@pytest.mark.parametrize(("name", "is_async"), WITH_DRAFTS if "qwen3_5" in RECURRENT else WITH_DRAFTS[:1])
def test_multi_token_prediction(name: str, is_async: bool, tiny_model: Tiny, tmp_path: Path) -> None:
    """The checkpoint's own layer drafts. Steps are scheduled before it is known which of the last drafts are right."""
    model = TinyModel(multi_token_prediction(tiny_model(name), tmp_path / "drafting"))
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    with engine(model.path, **OPTIONS, async_scheduling=is_async, speculative_config=drafts) as llm:
        assert core_of(llm).scheduler.vllm_config.scheduler_config.async_scheduling == is_async
        spoil(llm)
        check(llm, model, PROMPTS)
        check(llm, model, LONG, LONG_OUTPUTS)
        assert metric(llm, PREEMPTED) > 0, "nothing was preempted"
        rng = np.random.default_rng(123)
        counts = rng.integers(1, NEW_TOKENS + 1, len(PROMPTS)).tolist()
        check_equal(model, PROMPTS, run_with_arrivals(llm, PROMPTS, counts, rng), counts)
        if not is_async:  # vLLM itself fails to reset requests with wrong drafts in flight.
            check_equal(model, PROMPTS, run_with_resets(llm, PROMPTS, NEW_TOKENS), [NEW_TOKENS] * len(PROMPTS))
        assert 0.03 * metric(llm, DRAFTED) < metric(llm, ACCEPTED) < 0.95 * metric(llm, DRAFTED)


@pytest.mark.skipif("qwen3.5" not in FAMILIES, reason="this vLLM has no such model")
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_drafts_with_images(method: str, tmp_path: Path) -> None:
    """Drafts by the checkpoint's own layer, or of earlier tokens, after images and text, in chunks of 24 tokens."""
    seeing = make_seeing_model("qwen3.5", tmp_path)
    if method == "mtp":
        path = multi_token_prediction(seeing, tmp_path / "drafting", "model.language_model.")
        seeing = replace(seeing, path=path)
    asked = prompts(seeing)
    want = expected(seeing, asked, NEW_TOKENS)
    drafts = {"method": method, "num_speculative_tokens": 2} | ({"prompt_lookup_min": 1} if method == "ngram" else {})
    options = OPTIONS | seeing.limits | {"skip_tokenizer_init": False, "max_num_batched_tokens": 24}
    with engine(seeing.path, **options, speculative_config=drafts) as llm:
        assert read(ask(llm, asked, NEW_TOKENS)) == want
        assert read(ask(llm, asked[::-1], NEW_TOKENS)) == want[::-1]
        assert 0 < metric(llm, ACCEPTED) < metric(llm, DRAFTED)


@pytest.mark.openxla
def test_compiled(tiny_model: Tiny, tmp_path: Path) -> None:
    """The same tokens by graphs, with drafts by a layer, and no compilation after warm-up."""
    model = TinyModel(multi_token_prediction(tiny_model("qwen3-next"), tmp_path / "drafting"))
    options = OPTIONS | {"enforce_eager": False, "additional_config": {"neuron_config": {"max_padding": 1}}}
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    with engine(model.path, **options, speculative_config=drafts) as llm:
        before = compilations()
        spoil(llm)
        check(llm, model, PROMPTS)
        assert metric(llm, ACCEPTED) > 0
        assert compilations() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_memory_bytes": 1 << 15}, "raise it, or lower max_num_seqs or num_speculative_tokens$"),
        ({"speculative_config": "random-head"}, "drafts by eagle3 are not supported with Qwen3NextForCausalLM yet"),
    ],
    ids=["memory", "other drafters"],
)
def test_what_is_not_served_is_refused(options: dict[str, Any], words: str, tiny_model: Tiny) -> None:
    model = tiny_model("qwen3-next")
    kind = options.get("speculative_config", "ngram")
    options = OPTIONS | options | {"speculative_config": speculation(kind, model)}
    with pytest.raises(Exception, match=words), engine(model.path, **options):
        pass
