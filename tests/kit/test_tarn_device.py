"""The second example device: layout, layers, sampler and compiler of its own, and the kit's promises.

docs/new_device/how_to.md names its files as recipes.
"""

import re
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forks import WITHOUT_SEARCH, run_kit
from lane import ROOT
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.layernorm import RMSNorm

from model_runner_base.attention.cache_format import CacheFormat
from model_runner_base.attention.metadata import NEVER, PairPlan
from model_runner_base.caches.contiguous import set_line_size
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.testing import engine as kit_engine

TARN = ROOT / "examples" / "tarn_device"
DEVICE = ["tarn_device.worker.TarnWorker", "--platform", "tarn_device.platform.TarnPlatform"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TARN)


@cache
def overrides() -> dict[str, Any]:
    """Overrides of layers that the device registers when its module is imported."""
    before = dict(op_registry_oot)
    op_registry_oot.clear()
    import tarn_device.layers  # noqa: F401

    own = dict(op_registry_oot)
    op_registry_oot.clear()
    op_registry_oot.update(before)
    return own


@pytest.fixture
def registered() -> Iterator[None]:
    """Context of a config under which vLLM's layers run the device's overrides."""
    before, own = dict(op_registry_oot), overrides()
    op_registry_oot.clear()
    op_registry_oot.update(own)
    compilation = CompilationConfig(mode=CompilationMode.NONE, custom_ops=["all"])
    with set_current_vllm_config(VllmConfig(compilation_config=compilation)):
        yield
    op_registry_oot.clear()
    op_registry_oot.update(before)


def plan_of(pair_blocks: list[list[int]], last: list[int], first: list[int] | None, size: int) -> PairPlan:
    """Plan of one query a pair."""
    blocks = torch.tensor(pair_blocks, dtype=torch.int32)
    bounds = [None if each is None else torch.tensor(each, dtype=torch.int32).unsqueeze(1) for each in (first, last)]
    return PairPlan(
        block_size=size,
        kv_tile=size * blocks.shape[1],
        pair_tile=torch.arange(len(blocks), dtype=torch.int32),
        pair_start=torch.zeros(len(blocks), dtype=torch.int32),
        pair_blocks=blocks,
        first=bounds[0],
        last=bounds[1],  # type: ignore[arg-type]
        merge_tree=[],
    )


@pytest.mark.parametrize("first", [None, [2, 0, 5]], ids=["causal", "window"])
def test_layout_holds_what_the_bases_does(first: list[int] | None) -> None:
    """Another layout gives back what was written to it, and nothing that no query sees, not even a NaN."""
    from tarn_device.attention import TarnFormat

    heads, head_size, size, blocks = 2, 6, 4, 5
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 3 * size, heads * head_size, generator=generator)
    # Blocks 3, 1 and 4 are full; the others hold NaN, as after other requests.
    at = torch.tensor([3, 1, 4], dtype=torch.int32).repeat_interleave(size), torch.arange(3 * size).int() % size
    read = []
    for form in (CacheFormat(heads, head_size), TarnFormat(heads, head_size)):
        cache = torch.full(form.shape(blocks, size), float("nan"))
        form.write(cache, *at, key, value)
        plan = plan_of([[3, 1], [4, 2], [1, 3]], [6, 3, NEVER], first, size)
        read.append([torch.where(plan.is_seen[..., None, None], part, 0) for part in form.read(cache, plan)])
        assert all(part[:2].isfinite().all() for part in form.read(cache, plan))
    assert cache.shape == (blocks, 2, heads, head_size, size)
    for ours, theirs in zip(read[1], read[0], strict=True):
        assert torch.equal(ours, theirs) and ours[:2].any()


ROTARY: dict[str, dict[str, Any]] = {
    "RotaryEmbedding": {},
    "LinearScalingRotaryEmbedding": {"scaling_factors": [2.0]},
    "Llama3RotaryEmbedding": {
        "scaling_factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "orig_max_position": 32,
    },
    "YaRNScalingRotaryEmbedding": {"scaling_factor": 4.0},
}
"""Rotary classes of vLLM, with the arguments that others do not have."""


@pytest.mark.parametrize("is_neox", [True, False], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_classes(name: str, rotary_dim: int, is_neox: bool, registered: None) -> None:
    """Rotary classes turn as vLLM's own forward does, with keys and without."""
    cls = getattr(rotary_embedding, name)
    layer = cls(16, rotary_dim, 64, 10_000, is_neox, dtype=torch.float32, **ROTARY[name])
    assert type(layer).__module__ == "tarn_device.layers"
    positions = torch.tensor([0, 3, 63])
    query, key = torch.randn(3, 64), torch.randn(3, 32)
    for args in ((query, key), (query,)):
        want = layer.forward_native(positions, *(each.clone() for each in args))
        for ours, theirs in zip(layer(positions, *args), want, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs)


def test_rms_norm_takes_all_arguments(registered: None) -> None:
    """A norm without a weight, and one of a part of its input, are vLLM's; others add a residual first."""
    x, residual = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    for layer in (RMSNorm(8, 1e-2), RMSNorm(8, has_weight=False), RMSNorm(8, var_hidden_size=4)):
        assert type(layer).__name__ == "TarnRMSNorm"
        layer.weight.data = torch.rand(8) + 0.5
        torch.testing.assert_close(layer(x), layer.forward_native(x))
        for ours, theirs in zip(layer(x, residual), layer.forward_native(x.clone(), residual.clone()), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_refusals() -> None:
    """Another dtype than bfloat16, and blocks that do not hold a request, are refused with what to do."""
    from tarn_device.platform import TarnPlatform

    with pytest.raises(ValueError, match=r"float32 is not supported on this platform: use bfloat16"):
        TarnPlatform.check_if_supports_dtype(torch.float32)
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, user_specified_block_size=True),
        model_config=SimpleNamespace(max_model_len=250),
    )
    with pytest.raises(
        UnsupportedConfigError, match=r"block_size=16 is not supported on this device, .*: leave it out"
    ):
        set_line_size(config)
    config.cache_config.user_specified_block_size = False
    set_line_size(config)
    assert config.cache_config.block_size == 256


def test_nothing_is_compiled_after_start() -> None:
    """A shape that warm-up left out is an error, and no silent compilation."""
    from tarn_device.graphs import TarnPolicy

    policy = TarnPolicy()
    double = policy.wrap(lambda x: x * 2, [])
    assert double(torch.ones(3)).tolist() == [2, 2, 2] and policy.num_compilations() == 1
    policy.is_closed = True
    assert double(torch.zeros(3)).tolist() == [0, 0, 0]
    with pytest.raises(Exception, match=r"a graph of \[\(4,\)\] was not compiled at start"):
        double(torch.ones(4))


def test_checks_tell_what_fails_from_what_they_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks fail where nothing is preempted and no prefix is hit; with cache lines they have not looked."""
    monkeypatch.setattr(kit_engine, "metric", lambda llm, name: 2.0)
    for has_lines, error in ((False, AssertionError), (True, kit_engine.NotLooked)):
        monkeypatch.setattr(kit_engine, "has_cache_lines", lambda has_lines=has_lines: has_lines)
        llm: Any = None
        kit_engine.check_hit(True)
        kit_engine.check_preempted(llm, 1.0)
        with pytest.raises(error):
            kit_engine.check_hit(False)
        with pytest.raises(error):
            kit_engine.check_preempted(llm, 2.0)


def test_sampler_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results come back, and so does what the sampler wrote of each request; the policy makes no graph of it."""
    from tarn_device.graphs import TarnPolicy
    from tarn_device.sampler import on_host

    def sample(logits: torch.Tensor, slots: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, row: torch.Tensor):  # type: ignore[no-untyped-def]
        row += 1
        return logits.argmax(dim=-1), logits

    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as for a device that is not the host
    run, row = on_host(sample), torch.zeros(2)
    assert TarnPolicy().wrap(run, [row]) is run
    tokens, _ = run(torch.eye(3), *[torch.zeros(1)] * 3, row)
    assert tokens.tolist() == [0, 1, 2] and row.tolist() == [1, 1]


@pytest.mark.in_turns
def test_promises() -> None:
    """Greedy tokens from graphs are those of transformers, as far as bfloat16 leaves one alone right."""
    chosen = ["--profile", "smoke", "--no-shrinking", *WITHOUT_SEARCH, "-k", "test_equality and one_request and llama"]
    run = run_kit([*DEVICE, *chosen], TARN, timeout_s=900, VLLM_PLUGINS="", COLUMNS="1000")
    assert run.status == 0, run.printed[-5000:]
    assert "in bfloat16" in run.printed
    (count,) = re.findall(r"  passes  +(\d+) of 160 tokens counted", run.printed)
    assert int(count) > 40


def test_recipes_of_the_page_are_the_files() -> None:
    """Code that docs/new_device/how_to.md shows of the device is in its files."""
    page = (ROOT / "docs" / "new_device" / "how_to.md").read_text()
    files = {path.name: path.read_text() for path in (TARN / "tarn_device").glob("*.py")}
    shown = re.findall(r"tarn_device/(\w+\.py)\)[^`]*?```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert {"layers.py", "attention.py"} == {name for name, _ in shown}
    assert all(code in files[name] for name, code in shown)
