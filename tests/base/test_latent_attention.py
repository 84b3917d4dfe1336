"""Latent attention (MLA): models equal HF transformers in float32, from a cache of one row a token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compilations, engine
from lane import HAS_OPENXLA
from safetensors.torch import load_file, save_file
from test_reload import other_weights, reload_weights
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from model_runner_base.testing.architectures import INDEXER, LATENT, LATENT_LATER
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import run_with_arrivals, run_with_resets
from model_runner_base.testing.engine import core_of, generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import logits_after
from model_runner_base.testing.rules import log_softmax

Tiny = Callable[[str], TinyModel]
PROMPTS = random_prompts(110, [1, 2, 5, 16, 33, 64, 90, 130, 200])
NEW_TOKENS = 16
NAMES = [*LATENT, *([] if HAS_OPENXLA else LATENT_LATER)]
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "enforce_eager": True, "max_logprobs": -1}
INT8 = {"additional_config": {"neuron_config": {"quant_dtype": "s8"}}}
LARGEST = {"neuron_config": {"max_padding": 1}}
ROW = 24 + 8
"""Numbers that a layer keeps of a token: its latent, and its rotary key."""


def check(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> None:
    check_equal(model, prompts, tokens_of(generate(llm, prompts, greedy(count))), [count] * len(prompts))


def caches_of(llm: LLM) -> list[torch.Tensor]:
    """The cache of each attention layer."""
    layers = runner_of(llm).vllm_config.compilation_config.static_forward_context.values()
    caches = [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]
    return [cache[0] if isinstance(cache, list) else cache for cache in caches]


def largest_error(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]]) -> float:
    """Largest error of any log probability of the prompts' continuations."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=-1)
    errors = []
    for prompt, output in zip(prompts, generate(llm, prompts, params), strict=True):
        (completion,) = output.outputs
        want = log_softmax(logits_after(model, (*prompt, *completion.token_ids)))[len(prompt) - 1 :]
        for entries, row in zip(completion.logprobs or (), want[:-1], strict=True):
            errors.append(max(abs(entry.logprob - row[token]) for token, entry in entries.items()))
    return max(errors)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.once] * (name == "kimi-k2")) for name in NAMES])
def test_equals_transformers(name: str, tiny_model: Tiny) -> None:
    """Requests alone and in batches, prompts cut into chunks, prefixes found in the cache."""
    model = tiny_model(name)
    with engine(model.path, **OPTIONS) as llm:
        check(llm, model, PROMPTS)
        outputs = generate(llm, PROMPTS[-2:], greedy(NEW_TOKENS))
        check_equal(model, PROMPTS[-2:], tokens_of(outputs), [NEW_TOKENS] * 2)
        assert all(output.num_cached_tokens for output in outputs), "the prefix cache was not hit"
        assert largest_error(llm, model, PROMPTS) < 2e-4


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.once)], ids=["async", "sync"])
def test_small_steps(is_async: bool, tiny_model: Tiny) -> None:
    """Chunks of 16 tokens; requests that arrive at any step; some are aborted, or all preempted every 30 steps."""
    model, rng = tiny_model("deepseek-v3"), np.random.default_rng(4)
    options = OPTIONS | {"max_num_batched_tokens": 16, "max_num_seqs": 3, "async_scheduling": is_async}
    with engine(model.path, **options) as llm:
        counts = rng.integers(1, NEW_TOKENS + 1, len(PROMPTS)).tolist()
        check_equal(model, PROMPTS, run_with_arrivals(llm, PROMPTS, counts, rng), counts)
        check_equal(model, PROMPTS[:6], run_with_resets(llm, PROMPTS[:6], NEW_TOKENS), [NEW_TOKENS] * 6)


def test_cache_has_one_row_a_token(tiny_model: Tiny) -> None:
    """The cache holds the numbers that arithmetic says, no pairs of keys and values; few blocks preempt requests."""
    model = tiny_model("deepseek-v2")
    num_bytes = 14 * 16 * 2 * ROW * 4
    with engine(model.path, **OPTIONS | {"kv_cache_memory_bytes": num_bytes}, block_size=16, max_model_len=128) as llm:
        assert core_of(llm).scheduler.kv_cache_config.num_blocks == 14
        assert sum(cache.numel() * cache.itemsize for cache in caches_of(llm)) == num_bytes
        check(llm, model, random_prompts(111, [60, 70, 50, 40]), 40)
        assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"


@pytest.mark.once
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_equals_keys_and_values(name: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of all heads are kept with VLLM_MLA_DISABLE=1, and tokens are the same."""
    model = tiny_model(name)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    with engine(model.path, **OPTIONS) as llm:
        assert not llm.llm_engine.model_config.use_mla
        check(llm, model, PROMPTS)


def test_cache_lines(tiny_model: Tiny) -> None:
    """Blocks that hold whole requests, which decode reads without a block table."""
    model = tiny_model("deepseek-v2")
    with engine(model.path, **OPTIONS, max_model_len=256, block_size=256) as llm:
        check(llm, model, PROMPTS)


@pytest.mark.parametrize("is_eager", [True, pytest.param(False, marks=pytest.mark.openxla)])
def test_other_weights_are_loaded(is_eager: bool, tiny_model: Tiny, tmp_path: Path) -> None:
    """The absorbed projections are new after a reload, on the host and on a device, and nothing is compiled again."""
    old = tiny_model("deepseek-v2")
    new = other_weights(old, tmp_path / "new")
    with engine(old.path, **OPTIONS | {"enforce_eager": is_eager}, additional_config=LARGEST) as llm:
        before = compilations()
        check(llm, old, PROMPTS[:4])
        reload_weights(llm, weights_path=str(new.path))
        check(llm, new, PROMPTS[:4])
        reload_weights(llm, weights_path=str(old.path))
        check(llm, old, PROMPTS)
        assert compilations() == before
        device = runner_of(llm).device.type
        projections = [p for name, p in runner_of(llm).model.named_parameters() if name.endswith("_latent")]
        assert len(projections) == 4 and all(p.device.type == device for p in projections)


def with_indexer(model: TinyModel, path: Path, indexer: dict[str, int] = INDEXER) -> TinyModel:
    """A checkpoint of DeepSeek V3 as one of V3.2, with an indexer of random weights."""
    weights, config = load_file(model.path / "model.safetensors"), json.loads((model.path / "config.json").read_text())
    heads, width = indexer["index_n_heads"], indexer["index_head_dim"]
    shapes = {
        "wq_b.weight": (heads * width, config["q_lora_rank"]),
        "wk.weight": (width, config["hidden_size"]),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
        "weights_proj.weight": (heads, config["hidden_size"]),
    }
    for index in range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)):
        own = {f"model.layers.{index}.self_attn.indexer.{name}": torch.randn(shape) for name, shape in shapes.items()}
        weights |= own
    path.mkdir()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    named = {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config | named | indexer))
    return TinyModel(path)


def test_an_indexer_that_leaves_all_keys(tiny_model: Tiny, tmp_path: Path) -> None:
    """DeepSeek V3.2 has V3's tokens up to as many tokens as its indexer leaves keys. Settings that a longer context is
    not served with are refused before anything is loaded."""
    dense = tiny_model("deepseek-v3")
    sparse = with_indexer(dense, tmp_path / "sparse")
    with engine(sparse.path, **OPTIONS) as llm:
        check(llm, dense, PROMPTS)
    longer = EngineArgs(str(sparse.path), max_model_len=257, hf_overrides={"index_topk": 256}, enable_lora=True)
    with pytest.raises(ValueError, match=r"leave out enable_lora, or set max_model_len=256 or less"):
        longer.create_engine_config()


@pytest.mark.openxla
def test_compiled(tiny_model: Tiny) -> None:
    """The same tokens and log probabilities by graphs, and no compilation after warm-up."""
    model = tiny_model("deepseek-v3")
    with engine(model.path, **OPTIONS | {"enforce_eager": False}, additional_config=LARGEST) as llm:
        before = compilations()
        for prompt in PROMPTS[:3]:
            check(llm, model, [prompt])
        check(llm, model, PROMPTS)
        assert largest_error(llm, model, PROMPTS) < 2e-4
        assert compilations() == before


@pytest.mark.openxla
def test_int8(tiny_model: Tiny) -> None:
    """First tokens are mostly those of float32."""
    model, prompts = tiny_model("deepseek-v2"), random_prompts(93, [5, 9, 17, 30, 40, 64, 70, 90] * 3)
    with engine(model.path, **OPTIONS | INT8) as llm:
        got = tokens_of(generate(llm, prompts, greedy(1)))
    num_equal = sum(tokens == model.greedy(prompt, 1) for tokens, prompt in zip(got, prompts, strict=True))
    assert num_equal > 0.6 * len(prompts), f"{num_equal} of {len(prompts)}"


def multi_token_prediction(model: TinyModel, path: Path) -> TinyModel:
    """A checkpoint of DeepSeek V3 with a further layer that drafts, the last one once more.

    Layers add little to a token's embedding, so that this layer, which gets that and a state, is often right.
    """
    weights, config = load_file(model.path / "model.safetensors"), json.loads((model.path / "config.json").read_text())
    weights = {
        name: 0.03 * w if name.endswith(("o_proj.weight", "down_proj.weight")) else w for name, w in weights.items()
    }
    count, size = config["num_hidden_layers"], config["hidden_size"]
    last, own = f"model.layers.{count - 1}.", f"model.layers.{count}."
    drafts = {own + name.removeprefix(last): w.clone() for name, w in weights.items() if name.startswith(last)}
    drafts |= {own + name: torch.ones(size) for name in ("enorm.weight", "hnorm.weight")}
    drafts[own + "eh_proj.weight"] = torch.cat((torch.eye(size), 0.1 * torch.eye(size)), dim=1)
    drafts[own + "shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    drafts[own + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    drafts[own + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    path.mkdir()
    save_file(weights | drafts, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return TinyModel(path)


@pytest.fixture(scope="module")
def accepted() -> list[float]:
    """Number of drafts that each run has accepted."""
    return []


@pytest.mark.parametrize(
    "kind", ["keys and values", "latents", "an indexer", pytest.param("compiled", marks=pytest.mark.openxla)]
)
def test_multi_token_prediction(
    kind: str, tiny_model: Tiny, tmp_path: Path, accepted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's own layer drafts, with latents of its own, as many right tokens as with keys and values. So does
    that of a checkpoint whose indexer leaves all keys."""
    model = multi_token_prediction(tiny_model("deepseek-v3"), tmp_path / "drafting")
    served = with_indexer(model, tmp_path / "indexed") if kind == "an indexer" else model
    if kind == "keys and values":
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    options = OPTIONS | {"enforce_eager": kind != "compiled", "kv_cache_memory_bytes": 4 << 20}
    options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    with engine(served.path, **options, additional_config=LARGEST) as llm:
        before = compilations()
        check(llm, model, PROMPTS, 30)
        accepted.append(metric(llm, "vllm:spec_decode_num_accepted_tokens"))
        assert compilations() == before
    assert accepted[-1] == accepted[0] > 0


def test_prompt_lookup(tiny_model: Tiny) -> None:
    """Decode rows of several tokens each, which verify drafts."""
    model = tiny_model("deepseek-v2")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    with engine(model.path, **OPTIONS, speculative_config=drafts) as llm:
        check(llm, model, PROMPTS, 30)
        assert metric(llm, "vllm:spec_decode_num_drafts") > 0


def test_what_is_not_served_is_refused(tiny_model: Tiny) -> None:
    words = r"sparse attention \(DSA\) of DeepseekV2ForCausalLM is not supported yet"
    options = OPTIONS | {"hf_overrides": {"index_topk": 64}}
    with pytest.raises(Exception, match=words), engine(tiny_model("deepseek-v2").path, **options):
        pass
