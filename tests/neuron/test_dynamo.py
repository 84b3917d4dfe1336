"""Backends of Dynamo in the place of ``neuron``, which the newest lane is for: it has no torch_xla at all.

There the kit runs on a device of torch's key PrivateUse1, as TorchNeuron's is: a stand-in (``private_device``) whose
tensors the host may not read.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lane import HAS_OPENXLA, ROOT
from torch._dynamo import list_backends

from model_runner_base.step.sizes import StepLimits, Tiling
from neuron_runner.config import NeuronConfig, read_neuron_config
from neuron_runner.dynamo import DynamoPolicy
from neuron_runner.platform import NeuronPlatform

FEW_SIZES = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [1, 2, 4], "context_length_buckets": [256]}
OPTIONS = {"additional_config": {"neuron_config": FEW_SIZES | {"compile_backend": "aot_eager"}}}
ROWS = "test_equality and (test_one_request or test_mixed_batches) and llama or test_no_compilation or written_in_place"
ROWS += " or test_recurrent and mixed_batches and qwen3"
in_the_newest_lane = pytest.mark.skipif(HAS_OPENXLA, reason="the newest lane runs it: this one compiles on openxla")
FORGETFUL = """
from neuron_runner.dynamo import TorchDeviceOps
TorchDeviceOps.to_host = lambda self, tensor: tensor.numpy()
"""


def run_kit(options: dict[str, object], *arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs the kit in a process of Neuron's platform, whichever platform the lane has, with modules of ``path``."""
    paths = os.pathsep.join(map(str, (path, ROOT, ROOT / "tests" / "neuron" / "private_device")))
    environment = {**os.environ, "VLLM_NEURON_RUNNER": "1", "PYTHONPATH": paths, "COLUMNS": "300"}
    command = [sys.executable, "-m", "model_runner_base.testing", "neuron_runner.worker.NeuronWorker"]
    given = ["-p", "private_device", "--engine-options", json.dumps(options), *arguments]
    return subprocess.run([*command, *given], env=environment, cwd=ROOT, capture_output=True, text=True)


@in_the_newest_lane
def test_the_kit_holds() -> None:
    """Tokens are the reference's; graphs have static sizes, all of them made in warm-up; caches stay in place."""
    run = run_kit(OPTIONS, "-k", ROWS)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    results = re.findall(r" {2,}(passes|FAILS|not supported)", run.stdout)
    assert results == ["passes"] * 5, run.stdout[-8000:]


@in_the_newest_lane
def test_what_indexers_choose() -> None:
    """Layers of GLM-5 and MiniMax M3: tokens are the reference's, and nothing is compiled after warm-up."""
    sizes = FEW_SIZES | {"num_seqs_buckets": [4], "context_length_buckets": [160], "compile_backend": "aot_eager"}
    rows = "test_chosen_keys_in_mixed_batches or test_chosen_blocks_in_mixed_batches"
    run = run_kit({"additional_config": {"neuron_config": sizes}}, "-k", rows)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    assert re.findall(r" {2,}(passes|FAILS|not supported)", run.stdout) == ["passes"] * 2, run.stdout[-8000:]


@pytest.mark.full
@in_the_newest_lane
def test_a_copy_to_the_host_that_is_forgotten(tmp_path: Path) -> None:
    """The kit catches it, which on a device of the host it could not."""
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    run = run_kit(OPTIONS, "-p", "forgetful", "-k", "test_one_request and llama", path=tmp_path)
    assert run.returncode == 1, run.stdout[-8000:]
    assert "can't convert neuron:0 device type tensor to numpy" in run.stdout, run.stdout[-8000:]


def test_a_name_that_is_not_registered_is_refused() -> None:
    names = ", ".join(each for each in list_backends(exclude_tags=()) if not each.startswith(("openxla", "relu_")))
    with pytest.raises(ValueError, match=r"or a registered Dynamo backend \(.*\), got 'newron'") as raised:
        read_neuron_config({"neuron_config": {"compile_backend": "newron"}})
    assert names in str(raised.value)


def test_what_is_left_out_goes_by_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_OPENXLA:
        assert NeuronConfig().backend == "openxla"
    monkeypatch.setattr("neuron_runner.environment.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"neither torch_xla nor TorchNeuron.*registered Dynamo backend"):
        NeuronConfig().warms_up_in_background(1)
    monkeypatch.setattr("torch._dynamo.list_backends", lambda exclude_tags: ["neuron"])
    assert NeuronConfig().backend == "neuron" and NeuronConfig().warms_up_in_background(1)
    assert not NeuronConfig(warm_up="full").warms_up_in_background(1)
    monkeypatch.setattr("neuron_runner.environment.neuron_device_visible", lambda: True)
    assert not NeuronConfig().warms_up_in_background(1)
    assert NeuronConfig(warm_up="background").warms_up_in_background(1)


def test_serving_begins_after_a_few_sizes() -> None:
    """Sizes that hold all others come first, with those of one request and of a few, in the order of warm-up."""
    policy = DynamoPolicy(NeuronConfig(compile_backend="aot_eager"))
    limits = StepLimits(512, 64, 1024, Tiling(1, 64), Tiling(64, 64))
    policy.configure(limits)
    largest_first = sorted(policy.sizes, reverse=True)
    first = policy.first_sizes(largest_first)
    assert list(first) == sorted(first, reverse=True) and len(first) <= 6 < len(policy.sizes)
    policy.offer_only(first)
    assert all(policy.dispatch(size).holds(size) for size in policy.sizes)
    assert policy.dispatch(limits.decode_size(1, 1)).num_tokens == 1
    few = DynamoPolicy(NeuronConfig(compile_backend="aot_eager", **FEW_SIZES))
    few.configure(StepLimits(64, 4, 256, Tiling(1, 64), Tiling(64, 64)))
    assert len(few.first_sizes(few.sizes)) < len(few.sizes), "the kit compiles no size in a pause"
    full = DynamoPolicy(NeuronConfig(compile_backend="aot_eager", warm_up="full"))
    full.configure(limits)
    assert full.first_sizes(largest_first) == largest_first


def test_several_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="compile_backend=aot_eager needs one worker, there are 2"):
        NeuronConfig(compile_backend="aot_eager").warms_up_in_background(2)


@pytest.mark.parametrize(
    ("variable", "options", "message"),
    [("1", {}, "VLLM_NEURON_NKI=1 asks for kernels"), (None, {"quant_dtype": "s8"}, "quant_dtype is not supported")],
)
def test_what_a_backend_of_dynamo_does_not_take(
    variable: str | None, options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("VLLM_NEURON_NKI", variable)
    config = NeuronConfig(compile_backend="aot_eager", **options)
    with pytest.raises(ValueError, match=f"{message}.*compile_backend=aot_eager.*leave one of them out"):
        NeuronPlatform._check_dynamo(config)
