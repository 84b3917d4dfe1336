"""Models with recurrent layers, alone and among layers of attention, equal HF transformers in float32."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compilations, engine
from lane import HAS_OPENXLA
from safetensors.torch import load_file
from test_engine_contracts import VARIABLE
from test_reload import other_weights, reload_weights
from vllm import LLM, envs

from model_runner_base.models.loader import CheckpointError
from model_runner_base.scheduling.releases import has_known_steps
from model_runner_base.testing.architectures import hf
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import run_with_arrivals, run_with_resets
from model_runner_base.testing.engine import core_of, generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel, make_checkpoint
from model_runner_base.testing.recurrent_architectures import RECURRENT
from model_runner_base.testing.reference import logits_after
from model_runner_base.testing.rules import log_softmax
from model_runner_base.testing.sessions import OUTPUTS, Driver, Session

Tiny = Callable[[str], TinyModel]
PROMPTS = random_prompts(90, [1, 2, 3, 5, 16, 33, 64, 90, 130, 200])
NEW_TOKENS = 16
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "enforce_eager": True}
INT8 = {"additional_config": {"neuron_config": {"quant_dtype": "s8"}}}
TOLERANCE = 5e-4
"""Largest error of a log probability. Embeddings that differ by a rounding (1e-7 of themselves) move those of
transformers by up to 2.4e-4."""
KINDS = ["lfm2", "mamba", "granite-hybrid", "qwen3-next"]
"""A model of each kind of recurrent layer; the second has no other layers."""


def check(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> None:
    check_equal(model, prompts, tokens_of(generate(llm, prompts, greedy(count))), [count] * len(prompts))


def check_prompt_values(llm: LLM, model: TinyModel, prompts: list[tuple[int, ...]]) -> None:
    """Checks the log probability of each token of the prompts but the first."""
    for prompt, output in zip(prompts, generate(llm, prompts, greedy(1, prompt_logprobs=0)), strict=True):
        assert output.prompt_logprobs is not None
        entries = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        got = [entry[token].logprob for token, entry in entries if entry is not None]
        values = log_softmax(logits_after(model, prompt).astype(np.float64))
        np.testing.assert_allclose(got, values[np.arange(len(got)), prompt[1:]], rtol=0, atol=TOLERANCE)


def spoil(llm: LLM) -> None:
    """Overwrites all states: those of requests that are over, and the one that padding writes."""
    for layer in runner_of(llm).vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "get_state_shape"):
            (cache,) = layer.kv_cache if isinstance(layer.kv_cache, list) else (layer.kv_cache,)
            for state in [cache] if isinstance(cache, torch.Tensor) else cache:
                state.fill_(torch.nan)


OF_KNOWN_KINDS = ("falcon-mamba", "jamba", "mamba2", "falcon-h1", "qwen3-next", "nemotron-h")
"""Models whose layers are of a kind that another model has in the newest lane, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.once] * (name in OF_KNOWN_KINDS)) for name in RECURRENT]
)
def test_equals_transformers(name: str, tiny_model: Tiny) -> None:
    """Requests alone and in batches, prompts cut into chunks, with states that earlier requests have left, or NaN."""
    model = tiny_model(name)
    # Zamba 2 is right in transformers 4 within a chunk of 64 tokens alone; the newest lane has it with longer prompts.
    prompts = PROMPTS[:6] * 2 if name == "zamba2" and HAS_OPENXLA else PROMPTS
    with engine(model.path, **OPTIONS) as llm:
        for prompt in PROMPTS[:6]:
            check(llm, model, [prompt])
        spoil(llm)
        check(llm, model, prompts)
        check_prompt_values(llm, model, prompts[4:8])


@pytest.mark.parametrize(("num_tokens", "is_async"), [(3, True), (16, False)], ids=["3-async", "16-sync"])
@pytest.mark.parametrize("name", KINDS)
def test_small_steps(name: str, num_tokens: int, is_async: bool, tiny_model: Tiny) -> None:
    """Chunks of a few tokens; requests that arrive at any step; some are aborted, or all preempted every 30 steps."""
    model, rng = tiny_model(name), np.random.default_rng(4)
    options = OPTIONS | {"max_num_batched_tokens": num_tokens, "max_num_seqs": 3, "async_scheduling": is_async}
    with engine(model.path, **options) as llm:
        if has_known_steps():
            core_of(llm).scheduler.least_rows = 1
            has_rows = core_of(llm).scheduler._rows is not None
            assert has_rows != (name == "mamba"), "requests of hybrid models are scheduled in rows"
        counts = rng.integers(1, NEW_TOKENS + 1, len(PROMPTS)).tolist()
        check_equal(model, PROMPTS, run_with_arrivals(llm, PROMPTS, counts, rng), counts)
        if num_tokens == 16:  # Else a long prompt would never be done before the next reset.
            check_equal(model, PROMPTS[:8], run_with_resets(llm, PROMPTS[:8], NEW_TOKENS), [NEW_TOKENS] * 8)


@pytest.fixture
def contract(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The runner that vLLM's scheduler speaks to, "0" or "1": the second takes resumed requests for new ones."""
    monkeypatch.setenv(VARIABLE, request.param)
    envs.disable_envs_cache()
    yield request.param
    envs.disable_envs_cache()


@pytest.mark.parametrize("contract", ["0", "1"], indirect=True)
def test_few_blocks_preempt(contract: str, tiny_model: Tiny) -> None:
    model = tiny_model("granite-hybrid")
    with engine(model.path, **OPTIONS, max_model_len=256, block_size=16, num_gpu_blocks_override=18) as llm:
        assert core_of(llm).scheduler.use_v2_model_runner is (contract == "1")
        check(llm, model, random_prompts(91, [60, 70, 50, 40]), 70)
        assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"


@pytest.mark.parametrize(
    ("name", "options", "contract"),
    [
        ("lfm2", {"enable_prefix_caching": True, "block_size": 16}, "0"),
        ("lfm2", {}, "0"),
        ("lfm2", {"async_scheduling": False}, "0"),
        ("mamba2", {}, "0"),
        ("mamba2", {}, "1"),
    ],
    ids=["lfm2-prefixes", "lfm2", "lfm2-sync", "mamba2", "mamba2-second"],
    indirect=["contract"],
)
def test_sessions(name: str, options: dict[str, Any], contract: str, tiny_model: Tiny) -> None:
    """Sessions whose turns end by a stop token while a step is in flight, more of them than there are states."""
    model, rng = tiny_model(name), np.random.default_rng(7)
    prompts = random_prompts(92, [5, 30, 70, 1, 20, 45, 3, 3, 60, 12, 1, 9, 5, 7, 11])
    with engine(model.path, **OPTIONS | {"max_num_seqs": 2, "async_scheduling": True} | options) as llm:
        driver = Driver(llm)
        driver.stops = sorted({model.greedy(prompts[3 * index], OUTPUTS)[3] for index in range(4)})
        for index in range(4):
            driver.open(Session(f"session-{index}", prompts[3 * index : 3 * index + 3]))
            driver.ask(f"plain-{index}", prompts[11 + index])
            driver.step()
        for _ in range(1000):
            if not driver.is_open():
                break
            for session in driver.sessions.values():
                if session.sent <= len(session.chunks) and rng.random() < 0.1:
                    driver.feed(session)
            driver.step()
        assert not driver.is_open()
        driver.check(model)


RELOADED = ["lfm2", "qwen3-next", "granite-hybrid", "mamba2", *(["olmo-hybrid"] if "olmo-hybrid" in RECURRENT else [])]


@pytest.mark.parametrize("name", [*RELOADED, pytest.param("mamba", marks=pytest.mark.once)])
def test_other_weights_are_loaded(name: str, tiny_model: Tiny, tmp_path: Path) -> None:
    old = tiny_model(name)
    new = other_weights(old, tmp_path / "new")
    with engine(old.path, **OPTIONS) as llm:
        check(llm, old, PROMPTS[:4])
        reload_weights(llm, weights_path=str(new.path))
        check(llm, new, PROMPTS[:4])
        weights = load_file(new.path / "model.safetensors")
        part = {key: tensor for key, tensor in weights.items() if not key.endswith("dt_bias")}
        if len(part) < len(weights):
            with pytest.raises(CheckpointError, match="only a part of the weights"):
                reload_weights(llm, weights_iterator=list(part.items()))
            check(llm, new, PROMPTS[:4])


@pytest.mark.openxla
@pytest.mark.parametrize("name", KINDS)
def test_int8(name: str, tiny_model: Tiny) -> None:
    """First tokens are mostly those of float32."""
    model, prompts = tiny_model(name), random_prompts(93, [5, 9, 17, 30, 40, 64, 70, 90] * 3)
    with engine(model.path, **OPTIONS | INT8) as llm:
        got = tokens_of(generate(llm, prompts, greedy(1)))
    num_equal = sum(tokens == model.greedy(prompt, 1) for tokens, prompt in zip(got, prompts, strict=True))
    assert num_equal > 0.6 * len(prompts), f"{num_equal} of {len(prompts)}"


@pytest.mark.openxla
@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
def test_compiled(name: str, tiny_model: Tiny) -> None:
    """The same tokens by graphs, and no compilation after warm-up."""
    model = tiny_model(name)
    largest = {"neuron_config": {"max_padding": 1}}
    with engine(model.path, **OPTIONS | {"enforce_eager": False}, additional_config=largest) as llm:
        before = compilations()
        for prompt in PROMPTS[:5]:
            check(llm, model, [prompt])
        spoil(llm)
        check(llm, model, PROMPTS)
        assert compilations() == before


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("bamba" if "bamba" in RECURRENT else "nemotron-h", {"enable_lora": True}, "leave out enable_lora"),
        ("granite-hybrid", {"enable_lora": True, "tensor_parallel_size": 2}, "use tensor_parallel_size=1"),
        (
            "granite-hybrid",
            {"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"},
            "leave out scheduler_cls",
        ),
        ("mamba2", {"kv_cache_memory_bytes": 1 << 10}, "raise it, or lower max_num_seqs$"),
        (
            "mamba2",
            {"kv_cache_memory_bytes": 1 << 10, "enable_prefix_caching": True},
            "max_num_seqs, or leave out enable_prefix_caching$",
        ),
        ("mamba2", {"max_model_len": -1}, "give max_model_len|must be a positive integer"),
        ("granite-hybrid", {"mamba_cache_dtype": "float32"}, "leave out mamba_cache_dtype"),
        ("granite-hybrid", {"kv_cache_memory_bytes": 1 << 10}, "raise it, or lower max_num_seqs"),
    ],
)
def test_what_is_not_served_is_refused(name: str, options: dict[str, Any], words: str, tiny_model: Tiny) -> None:
    with pytest.raises(Exception, match=words), engine(tiny_model(name).path, **OPTIONS | options):
        pass


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("lfm2", {"tie_word_embeddings": False}, "use a checkpoint that does"),
        ("falcon-h1", {"mamba_norm_before_gate": True, "mamba_rms_norm": True}, "without mamba_norm_before_gate"),
        *([("bamba", {"attn_rotary_emb": None}, "set that to 8")] if "bamba" in RECURRENT else []),
        ("mamba", {"hidden_act": "gelu"}, "whose hidden_act is silu"),
        ("mamba2", {"time_step_limit": [0.0, 0.2]}, "whose time_step_limit"),
    ],
)
def test_checkpoints_that_vllm_computes_otherwise_are_refused(
    name: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = make_checkpoint(name, tmp_path).path
    config = hf.AutoConfig.from_pretrained(path)
    for field, value in change.items():
        setattr(config, field, value)
    config.save_pretrained(path)
    with pytest.raises(ValueError, match=words), engine(path, **OPTIONS):
        pass
