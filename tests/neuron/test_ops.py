"""Overrides of vLLM's layers: they take vLLM's place, agree with its native forward, and use the SDK's operators."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from vllm.config import (
    CompilationConfig,
    CompilationMode,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.ops.vit_attn_wrappers import torch_sdpa_wrapper

import neuron_runner
from model_runner_base.inputs.multimodal.towers.patches import PADDING
from model_runner_base.step.sizes import StepKind, StepSize
from neuron_runner import ops
from neuron_runner.compilation import CompiledFunction
from neuron_runner.ops.towers import segment_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = st.sampled_from(list(TOLERANCE))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Registers the overrides, in a config under which vLLM's layers use them."""
    before = dict(op_registry_oot)
    ops.register()
    compilation = CompilationConfig(mode=CompilationMode.NONE, custom_ops=["all"])
    with set_current_vllm_config(VllmConfig(compilation_config=compilation)):
        yield
    op_registry_oot.clear()
    op_registry_oot.update(before)


def rms_norm(dtype: torch.dtype, size: int) -> RMSNorm:
    norm = RMSNorm(size, dtype=dtype)
    norm.weight.data = torch.rand(size).to(dtype) + 0.5
    return norm


def rotary(dtype: torch.dtype, rotary_dim: int, is_neox: bool) -> RotaryEmbedding:
    return RotaryEmbedding(16, rotary_dim, 64, 10_000, is_neox, dtype)


def cases(dtype: torch.dtype, rows: int) -> list[tuple[Any, tuple[torch.Tensor, ...]]]:
    """Overrides with their inputs, every one of them."""
    torch.manual_seed(rows)
    x, residual, gated = (torch.randn(rows, size).to(dtype) for size in (24, 24, 40))
    positions, query, key = (
        torch.randint(0, 64, (rows,)),
        torch.randn(rows, 64).to(dtype),
        torch.randn(rows, 32).to(dtype),
    )
    layers: list[tuple[Any, tuple[torch.Tensor, ...]]] = [
        (rms_norm(dtype, 24), (x,)),
        (rms_norm(dtype, 24), (x, residual)),
        (SiluAndMul(), (gated,)),
        (GeluAndMul(), (gated,)),
        (GeluAndMul("tanh"), (gated,)),
        (rotary(dtype, 16, True), (positions, query)),
    ]
    return layers + [(rotary(dtype, dim, neox), (positions, query, key)) for dim in (16, 8) for neox in (True, False)]


def as_list(results: Any) -> list[torch.Tensor]:
    return [results] if torch.is_tensor(results) else [result for result in results if result is not None]


def assert_close(got: Any, want: Any, dtype: torch.dtype) -> None:
    for one, other in zip(as_list(got), as_list(want), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def native(layers: list[Any], run: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Results of vLLM's native forward on the same inputs."""
    return [x for layer, inputs in zip(layers, run, strict=True) for x in as_list(layer.forward_native(*inputs))]


@given(dtype=DTYPES, rows=st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_eager_agrees_with_vllm(dtype: torch.dtype, rows: int) -> None:
    for layer, inputs in cases(dtype, rows):
        assert type(layer).__module__.startswith("neuron_runner.ops")
        kept = [tensor.clone() for tensor in inputs]
        assert_close(layer(*inputs), layer.forward_native(*inputs), dtype)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, kept, strict=True))


def run_compiled(layers: list[Any], *runs: list[tuple[torch.Tensor, ...]]) -> list[list[torch.Tensor]]:
    """Results of the layers in each run, by openxla; one capture serves all numbers of rows."""
    lengths = [len(inputs) for inputs in runs[0]]
    for layer in layers:
        layer.to(torch_xla.device())

    def function(size: StepSize, *tensors: torch.Tensor) -> list[torch.Tensor]:
        rest, results = list(tensors), []
        for layer, length in zip(layers, lengths, strict=True):
            inputs, rest = rest[:length], rest[length:]
            results += [x * size.dims[0] for x in as_list(layer(*inputs))]
        return results

    compiled = CompiledFunction(function, [])
    outputs = []
    for run in runs:
        count = len(run[0][0])
        tensors = [tensor.to(torch_xla.device()) for inputs in run for tensor in inputs]
        with torch.no_grad():
            results = compiled(StepSize(StepKind.DECODE, (count,)), *tensors)
        outputs.append([x.cpu() / count for x in as_list(results)])
    assert sum(map(len, compiled._captures.values())) == 1
    return outputs


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["f32", "bf16"])
def test_openxla_agrees_with_vllm(dtype: torch.dtype) -> None:
    layers = [layer for layer, _ in cases(dtype, 2)]
    runs = [[inputs for _, inputs in cases(dtype, rows)] for rows in (2, 8)]
    want = [native(layers, run) for run in runs]
    for results, natives in zip(run_compiled(layers, *runs), want, strict=True):
        assert_close(results, natives, dtype)


def test_bfloat16_is_nearer_to_the_formula_than_vllm() -> None:
    """Overrides without the SDK have a purpose, too: one rounding instead of two or three."""
    for layer, inputs in cases(torch.bfloat16, 64)[2:]:
        if isinstance(layer, RotaryEmbedding):
            exact_inputs = [x.double() if x.is_floating_point() else x for x in inputs]
            exact = RotaryEmbedding(16, layer.rotary_dim, 64, 10_000, layer.is_neox_style, torch.bfloat16)
            exact.cos_sin_cache = layer.cos_sin_cache.double()
        else:
            exact, exact_inputs = layer, [inputs[0].double()]
        want = as_list(exact.forward_native(*exact_inputs))
        ours, theirs = as_list(layer(*inputs)), as_list(layer.forward_native(*inputs))
        for one, other, best in zip(ours, theirs, want, strict=True):
            assert (one.double() - best).abs().mean() < (other.double() - best).abs().mean()


class SdkRmsNorm(torch.autograd.Function):
    """RmsNorm as torch_neuronx.xla_impl.ops has it: float32 on an XLA device, the dimension by its index."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, dim: int) -> torch.Tensor:
        assert x.device.type == "xla" and x.dtype == torch.float32 and dim == x.dim() - 1
        SdkRmsNorm.calls += 1
        return x * torch.rsqrt(x.square().mean(dim, keepdim=True) + eps) * weight


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in of the Neuron SDK's fused operators; returns the names of those that were called."""
    calls: list[str] = []
    home = ModuleType("torch_neuronx.xla_impl.ops")
    home.RmsNorm = SdkRmsNorm  # type: ignore[attr-defined]
    for name in ("torch_neuronx", "torch_neuronx.xla_impl"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    for name in ("silu", "gelu"):
        plain = getattr(functional, name)

        def fused(x: torch.Tensor, *, name: str = name, plain: Any = plain, approximate: str = "") -> torch.Tensor:
            if x.device.type == "xla":
                calls.append(name + approximate)
            return plain(x, approximate=approximate) if approximate else plain(x)

        fused.__module__ = "torch_neuronx.xla_impl.functional"
        monkeypatch.setattr(functional, name, fused)
    monkeypatch.setattr(SdkRmsNorm, "calls", 0)
    return calls


def test_the_sdks_operators_are_used_on_the_device(sdk: list[str]) -> None:
    layers, run = map(list, zip(*cases(torch.float32, 4)[:5], strict=True))
    want = native(layers, run)
    for layer, inputs in zip(layers, run, strict=True):
        layer(*inputs)
    assert SdkRmsNorm.calls == 0 and sdk == []  # On the host's CPU they cannot run.
    assert_close(*run_compiled(layers, run), want, torch.float32)
    assert SdkRmsNorm.calls == 2
    assert sdk == ["silu", "gelunone", "gelutanh"]


def test_placeholder_packages_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Placeholder:
        def find_spec(self, name: str, *args: Any) -> None:
            if name.startswith("torch_neuronx"):
                raise RuntimeError("this is a placeholder: install from the other index")

    monkeypatch.setattr(sys, "meta_path", [Placeholder(), *sys.meta_path])
    (layer, inputs), *_ = cases(torch.float32, 2)
    want = native([layer], [inputs])
    assert_close(*run_compiled([layer], [inputs]), want, torch.float32)


def test_derived_layers_keep_their_own_forward() -> None:
    llama3 = Llama3RotaryEmbedding(16, 16, 64, 10_000, True, torch.float32, 8.0, 1.0, 4.0, 32)
    assert type(llama3) is Llama3RotaryEmbedding and type(GemmaRMSNorm(8)) is GemmaRMSNorm


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["f32", "bf16"])
def test_logits_are_capped_and_scaled_as_vllm_does(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 33) * 20).to(dtype)
    kept = logits.clone()
    processor = LogitsProcessor(33, logits_as_input=True, soft_cap=15.0, scale=0.25)
    got = processor(None, logits)
    assert type(processor).__module__ == "neuron_runner.ops.logits" and got.dtype == torch.float32
    assert torch.equal(logits, kept)
    torch.testing.assert_close(
        got, LogitsProcessor.forward(processor, None, logits).float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_the_platform_alone_registers_nothing() -> None:
    """The runner registers overrides, in its worker's process. Where another platform is chosen, vLLM's layers stay."""
    op_registry_oot.clear()
    neuron_runner.register()
    assert resolve_obj_by_qualname("neuron_runner.platform.NeuronPlatform").device_name == "xla"
    assert not op_registry_oot
    ops.register()
    ops.register()
    of_towers = ["Conv2dLayer", "Conv3dLayer", "MMEncoderAttention"]
    of_text = ["GeluAndMul", "LogitsProcessor", "RMSNorm", "RotaryEmbedding", "SiluAndMul"]
    assert sorted(op_registry_oot) == sorted(of_towers + of_text)


@pytest.mark.parametrize(("lengths", "reach"), [([400, 1, 350], 400), ([64] * 11 + [16, 30], 64)])
def test_patches_of_a_segment_see_each_other(lengths: list[int], reach: int) -> None:
    """Patches see those of their segment, as in vLLM segment by segment. Padding after them changes nothing."""
    count, padding = sum(lengths), 37
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(1, count + padding, 3, 8, generator=random) for _ in "qkv"]
    segments = np.append(np.repeat(np.arange(len(lengths)), lengths), [PADDING] * padding).astype(np.int32)
    got = segment_attention(*given, torch.from_numpy(segments), 0.4, reach)[:, :count]
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    want = torch_sdpa_wrapper(*(x[:, :count] for x in given), 0.4, bounds)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
