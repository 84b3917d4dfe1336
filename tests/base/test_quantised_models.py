"""Quantised checkpoints in engines: tokens and log probabilities are those of the plain weights that they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressed_packing as library
import numpy as np
import pytest
import torch
from compressed_packing import library_scheme
from conftest import engine
from greedy import NEW_TOKENS, expected, generate
from safetensors.torch import load_file, save_file
from test_dequantise import SCHEMES
from test_reload import reload_weights
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.platforms import current_platform

from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.models.quantized import configuration
from model_runner_base.models.quantized.configuration import format_of_model
from model_runner_base.testing import rules
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import generate as run
from model_runner_base.testing.engine import greedy, metric, tokens_of
from model_runner_base.testing.logprobs import TOLERANCE
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.quantized import EXAMPLES, Scheme, awq, fp8, gptq, nvfp4, write_checkpoints
from model_runner_base.testing.reference import logits_after

PROMPTS = random_prompts(20, [5, 30, 70])
Make = Callable[[str], TinyModel]


def changed(name: str, pack: Any, **config: Any) -> Scheme:
    return Scheme(SCHEMES[name].config | config, pack)


LATER = {
    "FP8": SCHEMES["fp8"],
    "AWQ": changed("awq", awq(32)),
    "GPTQ of 8 bits": changed("gptq of 8 bits", gptq(8, 32, False), group_size=32),
    "int8": library_scheme(library.INT8, rounds_activations=True),
    "int4": library_scheme(library.INT4_ASYMMETRIC),
    "float8": library_scheme(library.FP8_CHANNEL),
    "nvfp4": library_scheme(library.NVFP4),
    "ModelOpt's NVFP4": changed("modelopt nvfp4", nvfp4(".weight", ".weight_scale_2", False)),
}


def check(llm: LLM, model: TinyModel) -> None:
    """Compares greedy tokens, and the log probabilities of prompts and tokens, with HF transformers in float32."""
    outputs = run(llm, PROMPTS, greedy(NEW_TOKENS, logprobs=0, prompt_logprobs=0))
    assert tokens_of(outputs) == expected(model, PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = [*prompt, *output.outputs[0].token_ids]
        want = rules.log_softmax(logits_after(model, tokens))
        entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        got = [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)]
        np.testing.assert_allclose(got, want[np.arange(len(tokens) - 1), tokens[1:]], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", EXAMPLES)
def test_first_load(name: str, tiny_model: Make, tmp_path: Path) -> None:
    """A checkpoint of two shards, one of which has the scales."""
    kind, scheme = EXAMPLES[name]
    model = tiny_model(kind)
    quantised, plain = write_checkpoints(model, scheme, tmp_path, has_shards=True)
    assert expected(plain, PROMPTS) != expected(model, PROMPTS)  # Else this test would show nothing.
    with engine(quantised.path, max_model_len=128, enforce_eager=True) as llm:
        check(llm, plain)


def test_later_loads(tiny_model: Make, tmp_path: Path) -> None:
    """An engine that began with plain weights gets checkpoints of all formats, then tensors that are handed over."""
    model = tiny_model("llama")
    made = {name: write_checkpoints(model, scheme, tmp_path / name) for name, scheme in LATER.items()}
    with engine(model.path, max_model_len=128, enforce_eager=True) as llm:
        for name, (quantised, plain) in made.items():
            reload_weights(llm, weights_path=str(quantised.path))
            assert generate(llm, PROMPTS) == expected(plain, PROMPTS), name
        check(llm, plain)
        stored = load_file(quantised.path / "model.safetensors")
        scale = "model.layers.1.mlp.up_proj.weight_scale_2"
        rest = {name: tensor for name, tensor in stored.items() if name != scale}
        with pytest.raises(CheckpointError, match=rf"{scale} is missing, and ModelOpt needs it .*load again"):
            reload_weights(llm, weights_iterator=list(rest.items()))
        reload_weights(llm, weights_path=str(model.path))
        check(llm, model)
        (tmp_path / "other").mkdir()
        refused, _ = write_checkpoints(model, changed("awq", awq(32), bits=8), tmp_path / "other")
        with pytest.raises(UnsupportedConfigError, match="bits 8"):
            reload_weights(llm, weights_path=str(refused.path))
        # Weights that are handed over are of the format that was loaded last.
        reload_weights(llm, weights_path=str(quantised.path))
        reload_weights(llm, weights_iterator=list(reversed(stored.items())))
        assert generate(llm, PROMPTS) == expected(plain, PROMPTS)
        torn, _ = write_checkpoints(model, LATER["int4"], tmp_path / "torn", has_shards=True)
        for change, message in BREAKS.items():
            change(torn.path)
            with pytest.raises(CheckpointError, match=f"{message}.*the model keeps its weights"):
                reload_weights(llm, weights_path=str(torn.path))
        assert generate(llm, PROMPTS) == expected(plain, PROMPTS)


def test_a_quantised_draft(tiny_model: Make, tmp_path: Path) -> None:
    """A draft has a format of its own. FP8 changes some of its tokens; the drafts before those are accepted."""
    model = tiny_model("llama")
    drafts = speculation("same", model)
    quantised, _ = write_checkpoints(TinyModel(Path(drafts["model"])), LATER["FP8"], tmp_path)
    drafts |= {"model": str(quantised.path)}
    with engine(model.path, max_model_len=128, speculative_config=drafts, enforce_eager=True) as llm:
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        drafted, accepted = (metric(llm, f"vllm:spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
        assert accepted > 0.25 * drafted > 0


def transpose_scale(path: Path) -> None:
    change_tensor(path, "model.layers.0.mlp.up_proj.weight_scale", lambda scale: scale.T.contiguous())


def drop_zero_point(path: Path) -> None:
    change_tensor(path, "model.layers.1.self_attn.k_proj.weight_zero_point", None)


def cut_off(path: Path) -> None:
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def change_tensor(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensor = tensors.pop(name)
            save_file(tensors | ({name: change(tensor)} if change else {}), file, metadata={"format": "pt"})


BREAKS = {
    transpose_scale: r"layers\.0\.mlp\.up_proj\.weight cannot be dequantised from compressed-tensors: scales of shape",
    drop_zero_point: r"layers\.1\.self_attn\.k_proj\.weight_zero_point is missing, and compressed-tensors needs it",
    cut_off: r"model-00002-of-00002\.safetensors is cut off",
}
"""Faults of a checkpoint, put in one after the other, and what names each."""


def config_of(path: Path | str, **options: Any) -> Any:
    return EngineArgs(str(path), max_model_len=128, **options).create_engine_config()


def test_faults_are_named_before_an_engine_starts(tiny_model: Make, tmp_path: Path) -> None:
    torn, _ = write_checkpoints(tiny_model("llama"), LATER["int4"], tmp_path, has_shards=True)
    config = config_of(torn.path)
    assert config.model_config.quantization is config.quant_config is None
    for change, message in list(BREAKS.items())[1:]:
        change(torn.path)
        with pytest.raises(ValueError, match=message):
            config_of(torn.path)
    assert config_of(torn.path, load_format="dummy").quant_config is None
    with pytest.raises(ValueError, match="load_format=sharded_state cannot load a checkpoint that is dequantised"):
        config_of(torn.path, load_format="sharded_state")
    with pytest.raises(ValueError, match="quantization=fp8 does not read this checkpoint, which is of method compres"):
        config_of(torn.path, quantization="fp8")
    with pytest.raises(ValueError, match="quantization fp8 has no kernels here: leave it out"):
        config_of(tiny_model("llama").path, quantization="fp8")


def test_an_unknown_format_is_refused(tiny_model: Make, tmp_path: Path) -> None:
    path = write_checkpoints(tiny_model("llama"), Scheme({"quant_method": "quark"}, fp8()), tmp_path)[0].path
    with pytest.raises(ValueError, match="quantization quark has no kernels here and is not dequantised"):
        config_of(path)


def test_methods_with_kernels_stay_vllms(tiny_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that the platform lists, or one that a user registered, keeps the checkpoint's quantisation."""
    path = write_checkpoints(tiny_model("llama"), LATER["FP8"], tmp_path)[0].path
    platform = type(current_platform)
    monkeypatch.setattr(platform, "dtypes", (torch.float32, torch.bfloat16))  # vLLM's method takes no float32.
    monkeypatch.setattr(platform, "supported_quantization", ["fp8"])
    config = config_of(path, dtype="bfloat16")
    assert config.model_config.quantization == "fp8"
    assert config.quant_config is not None and format_of_model(config.model_config) is None
    monkeypatch.setattr(platform, "supported_quantization", [])
    method = type("Mine", (get_quantization_config("fp8"),), {})
    monkeypatch.setitem(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG, "fp8", method)
    assert type(config_of(path, dtype="bfloat16").quant_config) is method


@pytest.mark.parametrize(("name", "is_said"), [("int8", True), ("int4", False), ("FP8", True), ("AWQ", False)])
def test_the_log_says_what_is_done(
    name: str, is_said: bool, tiny_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(configuration.logger, "info_once", lambda text, *values: lines.append(text % values))
    quantised, _ = write_checkpoints(tiny_model("llama"), LATER[name], tmp_path)
    config_of(quantised.path, dtype="float32")
    assert f"weights of {quantised.path} are dequantised to float32 while they are loaded" in lines[0]
    assert ("activations are not quantised" in lines[0]) is is_said
