"""Limits raise one clear line each before work is lost, and other requests go on unharmed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import BUNDLED_MODEL, engine
from safetensors.torch import load_file, save_file
from vllm import EngineArgs, SamplingParams, envs

import neuron_runner
from model_runner_base.models import loader
from model_runner_base.testing.models import TinyModel
from neuron_runner import environment

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


def start(model: Path, **options: Any) -> None:
    with engine(model, **({"max_model_len": 128, "enforce_eager": True} | options)):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "float16 is not supported on this platform: use float32 or bfloat16"),
        ({"dtype": "int7"}, "int7"),
        ({"kv_cache_memory_bytes": 4096}, "(?i)kv cache"),
        ({"kv_cache_memory_bytes": 1 << 50}, "lower kv_cache_memory_bytes"),
        ({"additional_config": {"neuron_config": {"num_seqs_buckets": [3, 1]}}}, "must rise strictly"),
        ({"additional_config": {"neuron_config": {"num_seqs_buckets": [1, 2]}}}, "must end at max_num_seqs=4"),
        ({"additional_config": {"neuron_config": {"seqs": [1]}}}, "neuron_config.seqs: unknown option"),
        ({"pipeline_parallel_size": 2}, "pipeline stages do not run on this device yet"),
        ({"cpu_offload_gb": 1}, "leave out cpu_offload_gb"),
        ({"kv_offloading_size": 0}, "leave out kv_offloading_size"),
        (
            {
                "kv_offloading_size": 1,
                "enforce_eager": False,
                "additional_config": {"neuron_config": {"compile_backend": "torch.compile"}},
            },
            "KV connectors are not supported on this device yet",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "ExampleConnector is not supported: it reads slots of vLLM's own layout",
        ),
        (
            {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_producer"}},
            "leave out ec_transfer_config",
        ),
        ({"kv_sharing_fast_prefill": True}, "leave out kv_sharing_fast_prefill"),
        ({"enable_dbo": True}, "leave out enable_dbo"),
        ({"ubatch_size": 2, "all2all_backend": "deepep_low_latency"}, "leave out enable_dbo and ubatch_size"),
        (
            {"tensor_parallel_size": 2, "compilation_config": {"pass_config": {"enable_sp": True}}},
            "leave enable_sp and fuse_gemm_comms out of pass_config",
        ),
        ({"kv_cache_dtype": "bfloat16"}, "^kv_cache_dtype=bfloat16 is not supported in plain torch: use auto, fp8"),
        ({"logits_processors": ["no_such_module:Processor"]}, "Failed to load 0th LogitsProcessor plugin"),
        ({"attention_backend": "FLASH_ATTN"}, "attention backend FLASH_ATTN does not run here"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(
    options: dict[str, Any], message: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    with pytest.raises(Exception, match=message):
        start(tiny_model("llama").path, **options)


@pytest.fixture
def broken(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be broken."""
    return shutil.copytree(tiny_model("llama").path, tmp_path / "broken")


def test_missing_weight_is_named(broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"checkpoint .*broken.*layers\.1\.mlp\.down_proj\.weight is missing"):
        start(broken)


def test_misshapen_weight_is_refused(broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 100)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj\.weight has shape \[64, 100\], .* \[64, 128\]"):
        start(broken)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"qweight": torch.zeros(8, 64, dtype=torch.int32)}, ""),
        ({"weight": torch.zeros(64, 64, dtype=torch.uint8)}, ""),
        ({"weight": torch.zeros(64, 100)}, r"down_proj\.weight has shape \[64, 100\], and must have \[64, 128\]: .*"),
        ({}, r"down_proj\.weight is missing, of shape \[64, 128\]: .*"),
    ],
    ids=["other name", "packed", "misshapen", "missing"],
)
def test_what_a_quantised_checkpoint_has_of_its_own_is_no_fault(
    tensors: dict[str, torch.Tensor], message: str, broken: Path
) -> None:
    """The loader's message is kept. A misfit is named after it, but no tensors that only a quantised checkpoint has,
    though transformers' unquantised model has others."""
    weights = load_file(broken / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    del weights[f"{layer}.weight"]
    weights |= {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    config = EngineArgs(str(broken), max_model_len=128).create_engine_config()
    config.model_config.quantization = "gptq"
    with (
        mock.patch.object(loader, "get_model", side_effect=RuntimeError("out of memory")),
        pytest.raises(loader.CheckpointError, match=rf"broken: out of memory{message and '; compared .*'}{message}$"),
    ):
        loader.load_checkpoint(config)


def test_an_assertion_without_words_is_named(broken: Path) -> None:
    """The assertion is named when no tensor can be, as in a checkpoint that is not of safetensors."""
    torch.save(load_file(broken / "model.safetensors"), broken / "pytorch_model.bin")
    (broken / "model.safetensors").unlink()
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    with pytest.raises(loader.CheckpointError, match=r"cannot load checkpoint .*: AssertionError\(\)") as raised:
        start(broken)
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("size", ["0", "-1", "abc", "nan"])
def test_a_cache_of_no_size_is_refused(
    size: str, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", size)
    with pytest.raises(ValueError, match=f"VLLM_CPU_KVCACHE_SPACE={size} is not a size in GiB"):
        EngineArgs(str(tiny_model("llama").path), max_model_len=128).create_engine_config()


def test_unknown_architecture_is_named(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config["architectures"] = ["NobodysForCausalLM"]
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="NobodysForCausalLM"):
        start(broken)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {512: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "logprobs"),
    ],
    ids=str,
)
def test_bad_parameters_are_refused(
    params: dict[str, Any], message: str, shared_engine: Any, tiny_model: Callable[[str], TinyModel]
) -> None:
    with pytest.raises(ValueError, match=message):
        wanted = SamplingParams(max_tokens=8, **params)
        shared_engine.generate([{"prompt_token_ids": [5, 6, 7]}], wanted, use_tqdm=False)
    check_unharmed(shared_engine, tiny_model("llama"))


@pytest.mark.parametrize(
    ("prompt", "message"), [([5] * 128, "128"), ([], "(?i)empty"), ([10**6], "(?i)out of vocabulary")]
)
def test_bad_prompts_are_refused(
    prompt: list[int], message: str, shared_engine: Any, tiny_model: Callable[[str], TinyModel]
) -> None:
    with pytest.raises(ValueError, match=message):
        shared_engine.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
    check_unharmed(shared_engine, tiny_model("llama"))


@pytest.fixture(scope="module")
def shared_engine(tiny_model: Callable[[str], TinyModel]) -> Any:
    with engine(tiny_model("llama").path, max_model_len=128, enforce_eager=True) as llm:
        yield llm


def check_unharmed(llm: Any, model: TinyModel) -> None:
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == model.greedy((5, 6, 7), 8)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (environment.PackageNotFoundError(), "torch_xla is not installed: pip install torch_xla==2.9.0"),
        (["2.8.1"], r"torch_xla 2\.8\.1 does not match torch 2\.9: pip install"),
    ],
)
def test_torch_xla_must_be_there(found: Any, message: str) -> None:
    with (
        mock.patch.object(environment, "version", side_effect=found),
        pytest.raises(environment.MissingRequirementError, match=message),
    ):
        environment.check_torch_xla()


def test_placeholder_neuron_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public index's libneuronxla raises on import; with devices visible that must not pass for CPU."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)  # torch_xla has set it.
    with (
        mock.patch.object(environment.glob, "glob", return_value=["/dev/neuron0"]),
        mock.patch.dict(sys.modules, {"libneuronxla": None}),
    ):
        assert not environment.neuron_device_visible()
        with pytest.raises(environment.MissingRequirementError, match="placeholders or missing"):
            environment.check_torch_xla()


def neuron_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a machine with Neuron's driver and its real runtime package."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(environment.glob, "glob", lambda pattern: ["/dev/neuron0"])
    monkeypatch.setitem(sys.modules, "libneuronxla", SimpleNamespace(__version__="2.2"))


@pytest.mark.parametrize(("is_eager", "kv_cache_memory"), [(True, 1 << 29), (False, None)])
def test_eager_steps_beside_a_neuron_device_take_the_hosts_memory(
    is_eager: bool, kv_cache_memory: int | None, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager steps run on the host, so vLLM's variable for CPUs gives the size of their cache, and of no other."""
    neuron_machine(monkeypatch)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    path = str(tiny_model("llama").path)
    config = EngineArgs(path, max_model_len=128, enforce_eager=is_eager).create_engine_config()
    assert config.cache_config.kv_cache_memory_bytes == kv_cache_memory


def test_torch_xlas_own_variable_chooses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    neuron_machine(monkeypatch)
    assert environment.neuron_device_visible()
    with pytest.raises(environment.MissingRequirementError, match=r"torch_xla runs on CPU.*PJRT_DEVICE=CPU"):
        environment.check_device("CPU")
    environment.check_device("NEURON")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not environment.neuron_device_visible()
    environment.check_device("CPU")
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    monkeypatch.setattr(environment.glob, "glob", lambda pattern: [])
    with pytest.raises(environment.MissingRequirementError, match="driver shows no device"):
        environment.check_torch_xla()


@pytest.mark.parametrize(
    ("visible", "number", "workers", "message"),
    [
        (None, None, 64, None),
        ("0-3", None, 4, None),
        ("0-1, 4,6", "1", 4, None),  # The list goes before the number.
        ("2", None, 2, "2 workers take a Neuron core each, but NEURON_RT_VISIBLE_CORES=2 gives 1"),
        (None, "2", 4, "4 workers .* NEURON_RT_NUM_CORES=2 gives 2: give more cores, or lower tensor_parallel_size"),
        ("first", None, 1, "NEURON_RT_VISIBLE_CORES must be core numbers and ranges .* got 'first'"),
        ("3-1", None, 1, "NEURON_RT_VISIBLE_CORES=3-1 gives 0"),
        (None, "all", 1, "NEURON_RT_NUM_CORES must be a whole number, got 'all'"),
    ],
)
def test_workers_need_a_core_each(
    visible: str | None, number: str | None, workers: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ((environment.VISIBLE_CORES, visible), (environment.NUM_CORES, number)):
        monkeypatch.setenv(name, value or "")
    if message is None:
        environment.check_cores(workers)
    else:
        with pytest.raises(ValueError, match=message):
            environment.check_cores(workers)


@pytest.mark.parametrize(
    ("variable", "accelerator", "taken"),
    [(None, None, True), (None, "cuda", False), ("1", "cuda", True), ("0", None, False), ("0", "cuda", False)],
)
def test_platform_leaves_a_machine_with_another_accelerator(
    variable: str | None, accelerator: str | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = {name: lambda: None for name in ("tpu", "cuda", "rocm", "xpu")}
    if accelerator:
        plugins[accelerator] = lambda: "some.Platform"
    monkeypatch.setattr("vllm.platforms.builtin_platform_plugins", plugins)
    monkeypatch.delenv(neuron_runner.PLATFORM_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(neuron_runner.PLATFORM_VARIABLE, variable)
    assert (neuron_runner.register() is not None) is taken


def test_variable_keeps_the_platform_away_in_a_real_process() -> None:
    code = "from vllm.platforms import current_platform; print(type(current_platform).__name__)"
    for value, name in (("0", "UnspecifiedPlatform"), ("1", "NeuronPlatform")):
        environment_variables = {"VLLM_LOGGING_LEVEL": "ERROR", neuron_runner.PLATFORM_VARIABLE: value, "PATH": ""}
        out = subprocess.run([sys.executable, "-c", code], env=environment_variables, capture_output=True, text=True)
        assert out.stdout.strip().endswith(name), out.stderr


STARTED_BEFORE = """
import torch, torch_xla
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    assert (torch.ones(2, device=torch_xla.device()) + 1).sum().item() == 4
    llm = LLM({model!r}, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64)
    print("tokens", len(llm.generate("In the", SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids))
"""


def run_script(script: str, path: Path, **variables: str) -> subprocess.CompletedProcess:
    path.write_text(script)
    # Engines in this process have set what they need.
    of_others = {"VLLM_WORKER_MULTIPROC_METHOD", "XLA_COMPILATION_CACHE_SIZE"}
    environ = {name: value for name, value in os.environ.items() if name not in of_others}
    environ |= {"VLLM_NEURON_RUNNER": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    return subprocess.run([sys.executable, path], env=environ, capture_output=True, text=True, timeout=400)


@pytest.mark.full
def test_an_engine_starts_in_a_process_that_used_xla(tmp_path: Path) -> None:
    """An engine core is not forked then, since it would wait for ever for XLA's threads."""
    script = STARTED_BEFORE.format(model=str(BUNDLED_MODEL))
    result = run_script(script, tmp_path / "script.py", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert "tokens 5" in result.stdout, result.stderr[-2000:]


def test_vllm_reads_anew_how_processes_are_started(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables are read anew, since an engine in this process has made vLLM keep what they were."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(environment, "xla_is_running", lambda: True)
    envs.disable_envs_cache()
    envs.enable_envs_cache()
    try:
        EngineArgs(str(tiny_model("llama").path), max_model_len=128).create_engine_config()
        assert envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn"
    finally:
        envs.disable_envs_cache()


@pytest.mark.in_turns
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        pytest.param(
            {"XLA_COMPILATION_CACHE_SIZE": "3"},
            "and torch_xla keeps 3: set XLA_COMPILATION_CACHE_SIZE above",
            marks=pytest.mark.full,
        ),
        ({"TORCHDYNAMO_DISABLE": "1"}, "torch.compile did nothing: unset TORCHDYNAMO_DISABLE"),
    ],
    ids=str,
)
def test_variables_that_leave_no_graph_to_run_are_named(
    variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    script = STARTED_BEFORE.format(model=str(BUNDLED_MODEL))
    result = run_script(script, tmp_path / "script.py", VLLM_ENABLE_V1_MULTIPROCESSING="0", **variables)
    assert result.returncode and message in result.stderr, result.stderr[-2000:]
