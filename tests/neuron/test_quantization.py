"""int8 weights: an engine computes what HF transformers computes with weights that NumPy rounded."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
from conftest import BUNDLED_MODEL, engine
from counts import examples
from greedy import expected, generate
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file
from test_reload import FEW_BUCKETS, other_weights, reload_weights
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from examples import quantization
from model_runner_base.models.layers.fused_moe import Experts, run_experts
from model_runner_base.models.loader import CheckpointError
from model_runner_base.step.sizes import StepKind, StepSize
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import DEFAULTS
from model_runner_base.testing.models import TinyModel, reference_model
from model_runner_base.testing.quantized import EXAMPLES, write_checkpoints
from neuron_runner.compilation import CompiledFunction
from neuron_runner.metrics import CompilationCount
from neuron_runner.platform import NeuronPlatform
from neuron_runner.quantization import Int8Experts, int8_matmul, quantize

PROMPTS = random_prompts(20, [5, 30, 70])
INT8 = {"neuron_config": FEW_BUCKETS | {"quant_dtype": "s8"}}


def rounded(weight: np.ndarray) -> np.ndarray:
    """Values of ``weight`` [out, in] as int8 with a scale a row holds them."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1
    return np.clip(np.rint(weight / scale), -127, 127) * scale


def rounded_checkpoint(model: TinyModel, directory: Path) -> TinyModel:
    """The checkpoint with every linear and embedding weight rounded, but for those that choose experts."""
    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not name.endswith("gate"):
            module.weight.data = torch.from_numpy(rounded(module.weight.data.numpy()))
    reference.save_pretrained(directory)
    return TinyModel(directory)


@given(arrays(np.float32, (5, 7), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
@settings(max_examples=examples(50), deadline=None)
def test_a_rounded_weight_is_half_a_step_away_at_most(weight: np.ndarray) -> None:
    weight[0] = 0
    values, scale = quantize(torch.from_numpy(weight), dim=1)
    assert values.dtype == torch.int8 and scale.shape == (5,)
    back = values.numpy().astype(np.float64) * scale.numpy()[:, None].astype(np.float64)
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    assert (np.abs(back - weight) <= step * 0.501 + 1e-35).all()
    assert (back[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_right_at_every_number_of_rows_from_one_capture(dtype: torch.dtype) -> None:
    values, scale = quantize(torch.randn(48, 40, generator=torch.Generator().manual_seed(0)), dim=0)
    on_device = values.to(torch_xla.device()), scale.to(torch_xla.device())
    compiled = CompiledFunction(lambda size, x: int8_matmul(x, *on_device) * size.dims[0], [])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    with torch.no_grad():
        for count in (2, 1, 25, 64):
            x = torch.randn(count, 48, generator=torch.Generator().manual_seed(count)).to(dtype)
            x[0, 0] = -torch.inf if count == 25 else x[0, 0]  # One row's overflow is no other row's.
            got = compiled(StepSize(StepKind.DECODE, (count,)), x.to(torch_xla.device())).cpu() / count
            want = x.double() @ (values.double() * scale)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
            eager = int8_matmul(x, values, scale).double()
            torch.testing.assert_close(eager, want, rtol=tolerance, atol=tolerance)
    assert sum(map(len, compiled._captures.values())) == 1


@pytest.mark.parametrize("num_tokens", [1, 10, 70])
def test_experts_compute_with_the_rounded_weights(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    gate_up, down = quantize(torch.randn(12, 6, 10), dim=1), quantize(torch.randn(12, 5, 6), dim=1)
    biases = torch.randn(12, 10), torch.randn(12, 6)
    ids, weights = torch.rand(num_tokens, 12).topk(2).indices, torch.rand(num_tokens, 2)
    hidden = torch.randn(num_tokens, 6)
    plain = Experts(gate_up[0] * gate_up[1].unsqueeze(1), down[0] * down[1].unsqueeze(1), "silu", *biases)
    got: Any = run_experts(Int8Experts(*gate_up, *down, "silu", *biases), hidden, ids, weights)  # type: ignore[arg-type]
    torch.testing.assert_close(got, run_experts(plain, hidden, ids, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma", "mixtral"])
def test_tokens_are_those_of_rounded_weights(name: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Tokens are those of rounded weights also after weights were loaded anew. Nothing is compiled for any of it."""
    old = tiny_model(name)
    new = other_weights(old, tmp_path / "new")
    old_rounded, new_rounded = (rounded_checkpoint(model, tmp_path / model.path.name) for model in (old, new))
    assert expected(old_rounded, PROMPTS) != expected(old, PROMPTS)  # Else this test would show nothing.
    with engine(old.path, max_model_len=128, additional_config=INT8) as llm:
        before = CompilationCount.now()
        assert generate(llm, PROMPTS) == expected(old_rounded, PROMPTS)
        reload_weights(llm, weights_path=str(new.path))
        assert generate(llm, PROMPTS) == expected(new_rounded, PROMPTS)
        reload_weights(llm, weights_iterator=list(load_file(old.path / "model.safetensors").items()))
        assert generate(llm, PROMPTS) == expected(old_rounded, PROMPTS)
        assert CompilationCount.now() == before
        for item in load_file(new.path / "model.safetensors").items():
            with pytest.raises(CheckpointError, match="reload_weights"):
                llm.apply_model(lambda module, item=item: module.load_weights([item]))
        assert generate(llm, PROMPTS) == expected(old_rounded, PROMPTS)


def test_all_options_together_compile_nothing_late(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Options are int8, given buckets, capped drawing and a contiguous cache; an untied head too."""
    model = tiny_model("llama")
    options = INT8["neuron_config"] | {"on_device_sampling_config": {"global_topk": 64}}
    additional = {"neuron_config": options}
    with engine(model.path, max_model_len=128, block_size=128, additional_config=additional) as llm:
        before = CompilationCount.now()
        assert generate(llm, PROMPTS) == expected(rounded_checkpoint(model, tmp_path / "rounded"), PROMPTS)
        drawn = {"max_tokens": 12, "detokenize": False, "ignore_eos": True, "seed": 1}
        params = [
            SamplingParams(**drawn),
            SamplingParams(**drawn, temperature=0.8, top_k=5, top_p=0.9, logprobs=3),
            SamplingParams(**drawn, presence_penalty=0.5, min_p=0.1),
        ]
        llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], params)
        assert CompilationCount.now() == before


def test_eager_rounds_alike(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny_model("llama")
    with engine(model.path, max_model_len=128, additional_config=INT8, enforce_eager=True) as llm:
        assert generate(llm, PROMPTS) == expected(rounded_checkpoint(model, tmp_path / "rounded"), PROMPTS)


# Genesis 1, 1 to 5.
TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there be "
    "light: and there was light. And God saw the light, that it was good: and God divided the light from the darkness. "
    "And God called the light Day, and the darkness he called Night. "
    "And the evening and the morning were the first day."
)


def test_the_bundled_model_keeps_its_tolerance(tmp_path: Path) -> None:
    """Tolerances that docs/quantization.md states: logits, perplexity and tokens against HF transformers in float32."""
    model = TinyModel(BUNDLED_MODEL)
    rounded_model = rounded_checkpoint(model, tmp_path / "rounded")
    ids = AutoTokenizer.from_pretrained(BUNDLED_MODEL)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        logits, rounded_logits = (reference_model(path)(ids).logits[0] for path in (model.path, rounded_model.path))
    assert (logits - rounded_logits).abs().max() < 0.35

    def log_likelihood(scores: torch.Tensor) -> torch.Tensor:
        return scores[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    perplexity, rounded_perplexity = ((-log_likelihood(x).mean()).exp() for x in (logits, rounded_logits))
    assert abs(rounded_perplexity / perplexity - 1) < 0.01

    prompt = tuple(ids[0].tolist())
    prompts = [prompt[:length] for length in (5, 20, 60)]
    with engine(BUNDLED_MODEL, max_model_len=128, additional_config=INT8) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params)
        got = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        np.testing.assert_allclose(got, log_likelihood(rounded_logits), atol=1e-4)
        tokens = generate(llm, prompts)
    assert tokens == expected(rounded_model, prompts)
    print(f"{(logits - rounded_logits).abs().max():.3f} {perplexity:.4f} {rounded_perplexity:.4f}")
    print(np.mean(np.array(tokens) == np.array(expected(model, prompts))))


@pytest.mark.full
def test_the_example_shows_text_and_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    quantization.main()
    shown = capfd.readouterr().out
    plain, int8 = (int(number.replace(",", "")) for number in re.findall(r"bytes of weights .*: ([\d,]+)", shown))
    assert plain / int8 > 3.8
    assert shown.count("In the beginning God created") == 2


def test_int8_of_what_a_platform_serves_is_refused(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that keep their quantisation, since a platform lists the method, are not stored as int8."""
    monkeypatch.setattr(NeuronPlatform, "supported_quantization", ["compressed-tensors"])
    quantised = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "int-quantized"}
    with pytest.raises(Exception, match=r"quantised already \(compressed-tensors\).*leave out quant_dtype"):
        LLM(
            str(tiny_model("llama").path),
            additional_config=INT8,
            hf_overrides={"quantization_config": quantised},
            **(DEFAULTS | {"max_model_len": 128, "dtype": "float32"}),
        )


def test_a_quantised_checkpoint_is_rounded_to_int8(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Dequantised weights are rounded like plain ones, and so are those of a later checkpoint in another format."""
    model = tiny_model("qwen3")
    first, plain = write_checkpoints(model, EXAMPLES["GPTQ in act order"][1], tmp_path / "first")
    second, other = write_checkpoints(model, EXAMPLES["experts in blocks of FP8"][1], tmp_path / "second")
    want, want_other = (rounded_checkpoint(each, tmp_path / f"rounded {each is plain}") for each in (plain, other))
    assert expected(want, PROMPTS) != expected(plain, PROMPTS)
    with engine(first.path, max_model_len=128, additional_config=INT8) as llm:
        before = CompilationCount.now()
        assert generate(llm, PROMPTS) == expected(want, PROMPTS)
        reload_weights(llm, weights_path=str(second.path))
        assert generate(llm, PROMPTS) == expected(want_other, PROMPTS)
        assert CompilationCount.now() == before


def test_two_workers_share_dequantised_experts(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    kind, scheme = EXAMPLES["experts in blocks of FP8"]
    quantised, plain = write_checkpoints(tiny_model(kind), scheme, tmp_path, has_shards=True)
    with engine(quantised.path, max_model_len=128, enforce_eager=True, tensor_parallel_size=2) as llm:
        assert generate(llm, PROMPTS) == expected(plain, PROMPTS)
