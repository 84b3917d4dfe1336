"""The conformance kit holds the example device to vLLM's promises, and a broken device to account."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from counts import IS_FULL
from devices import COMPILING, FROM_SCRATCH, IN_INFERENCE_MODE, PADDED
from kit_runs import (
    COMPILED,
    FEWER,
    FEWER_SCHEDULES,
    FEWEST_SCHEDULES,
    NOT_NOW,
    PLAIN,
    SIZES_COMPILED,
    assert_all_pass,
    measure,
    run,
    run_forked,
)
from lane import HAS_OPENXLA

from docs_build import kit_results
from model_runner_base.testing.table import refusal

ROOT = Path(__file__).parents[2]
CHOSEN = ["-k", "test_presence or eos"]
ALL = [*FEWER, "--ranks", "2"] if HAS_OPENXLA else [*FEWER_SCHEDULES, "--stages", "2", "--replicas", "2"]
# The newest lane leaves out what draws by chance alone, which vLLM has no part in. Servers with several workers take
# long, so each kind runs in one lane.
LEFT_OUT_WITH_OPENXLA = ["test_stages.py", "test_replicas.py"]
LEFT_OUT_OF_THE_NEWEST = ["distributions", "test_ranks.py"]
# Further cases that run with --full and --record alone. In the newest lane: what project/test_server.py has there;
# schedules of one architecture; and of two drafters what is no comparison of greedy tokens. With torch_xla: what
# test_conformance_openxla.py has, and what the newest lane has on this device and vLLM's release has no part in.
FURTHER_ON_THE_NEWEST = ["eagle-synchronous and not (drawn or greedy)", "test_server.py"]
FURTHER_ON_THE_NEWEST += ["test_random_schedules and window", "always-wrong and not greedy"]
FURTHER = [COMPILED, *SIZES_COMPILED, "test_random_schedules", "test_state_schedules", "test_soak", "test_draft_gaps"]
FURTHER += ["test_speculation.py and not (always-wrong or eagle-synchronous)", "test_long_contexts", "by_family"]
FURTHER += ["test_attention.py", "test_multimodal.py", "test_recurrent.py and not wrong_drafts"]

# The platform first: what comes below asks vLLM for it.
SILENT = """
from examples.plain_device import PlainPlatform
from examples.plain_device import PlainWorker
from model_runner_base.heads.sampling.penalties import Penalties
Penalties.asked_by = lambda self, params: False
"""

REFUSING = """
from examples.plain_device import PlainPlatform
from examples.plain_device import PlainWorker
from model_runner_base.admission import limits
def refuse(params, token_ids, vocab_size):
    if params.presence_penalty:
        raise ValueError("presence_penalty is not supported on this device")
limits.check_request = refuse
"""

UNFINISHED = """
from examples.plain_device import PlainPlatform
from examples.plain_device import PlainModelRunner, PlainWorker as Finished
from model_runner_base import ModelRunnerBase
class Runner(PlainModelRunner):
    load_model = ModelRunnerBase.load_model
class PlainWorker(Finished):
    model_runner_cls = Runner
"""


def but(left_out: list[str]) -> str:
    """Pytest's -k expression for all that none of the expressions chooses."""
    return " and ".join(f"not ({each})" for each in left_out)


def test_keeps_every_promise(pytestconfig: pytest.Config) -> None:
    is_recorded = pytestconfig.getoption("record")
    further = FURTHER if HAS_OPENXLA else FURTHER_ON_THE_NEWEST
    left_out = LEFT_OUT_WITH_OPENXLA if HAS_OPENXLA else LEFT_OUT_OF_THE_NEWEST
    left_out = left_out + ([] if IS_FULL or is_recorded else [*further, *NOT_NOW])
    chosen = ["-k", but(left_out)]
    status, results, printed = measure("example device (torch CPU)", [*PLAIN, *ALL, *chosen], is_recorded)
    # With torch_xla few are left, of which a part runs at a commit.
    assert_all_pass(status, results, printed, fewest=20 if HAS_OPENXLA and not (IS_FULL or is_recorded) else 41)
    assert "Warning" not in printed and "leaked" not in printed, "lines that a vendor cannot do anything about"
    assert re.search(r"^\d+ checks; on the example device about (a minute|\d+ \w+)$", printed, re.M)


def test_a_promise_that_is_kept_no_more(tmp_path: Path) -> None:
    """A row that passed when it was measured may neither fail nor be refused; one that was refused may."""
    file = tmp_path / "results.json"
    before = [
        {"group": "lora", "promise": promise, "result": result, "reason": reason}
        for promise, result, reason in [("a", "passes 3 cases", ""), ("b", "passes", ""), ("c", "not supported", "no")]
    ]
    kit_results.record("device, vLLM 1", before, file)
    kit_results.record("other, vLLM 1", [before[0]], file)
    assert kit_results.broken("device, vLLM 1", before, file) == []
    assert kit_results.cell(kit_results.load(file)["device, vLLM 1"]["lora"]) == "2 of 3 kept; refused: no"
    after = [before[0] | {"result": "FAILS 1 of 3", "reason": "x"}, before[1] | {"result": "not supported"}, before[2]]
    broken = kit_results.broken("device, vLLM 1", after, file)
    assert broken == ["lora: a: FAILS 1 of 3: x", "lora: b: not supported: "]
    assert kit_results.broken("third, vLLM 1", after, file) == []


@pytest.mark.once
@pytest.mark.in_turns
@pytest.mark.parametrize(
    ("module", "status", "result", "words"),
    [
        (SILENT, 1, "FAILS 4 of 4", r"\[2\.0\] llama-with-tokenizer, SamplingParams\(presence_penalty=2\.0"),
        (REFUSING, 0, "not supported", r"\[2\.0\] presence_penalty is not supported on this device"),
        (UNFINISHED, 1, "FAILS 4 of 4", r"\[2\.0\] the engine does not start, in \w+: NotImplementedError"),
    ],
    ids=["ignores a penalty", "refuses a penalty", "lacks a hook"],
)
def test_broken_device(module: str, status: int, result: str, words: str, tmp_path: Path) -> None:
    """A device that ignores what it is asked fails; one that says so does not. Neither harms the other checks."""
    (tmp_path / "vendor.py").write_text(module)
    got, results, printed = run_forked(["vendor.PlainWorker", "--platform", "vendor.PlainPlatform", *CHOSEN], tmp_path)
    assert (got, results["presence penalty"]) == (status, result), printed[-8000:]
    assert re.search(words, printed), printed[-8000:]
    others = {value for promise, value in results.items() if promise != "presence penalty"}
    assert all(value.startswith("FAILS" if module is UNFINISHED else "passes") for value in others), printed[-8000:]


@pytest.mark.once
@pytest.mark.in_turns
@pytest.mark.parametrize("module", [FROM_SCRATCH, PADDED], ids=["from scratch", "padded"])
def test_schedules_hold_on_variants_of_a_device(module: str, tmp_path: Path) -> None:
    """Checks of schedules pass with every step built from scratch, as they do with repeated steps. They pass where
    steps are padded, too, so that repeated ones can grow."""
    (tmp_path / "vendor.py").write_text(module)
    device = ["vendor.PlainWorker", "--platform", "vendor.PlainPlatform"]
    some = "test_schedules" if IS_FULL else "test_schedules and not (test_random_schedules and (gemma3 or chunks))"
    status, results, printed = run_forked([*device, "-k", some, *FEWEST_SCHEDULES], tmp_path)
    assert status == 0 and results, printed[-8000:]
    assert all(result.startswith("passes") for result in results.values()), printed[-8000:]


@pytest.mark.once
def test_sizes_that_are_made_while_steps_run(tmp_path: Path) -> None:
    (tmp_path / "vendor.py").write_text(COMPILING)
    device = ["vendor.PlainWorker", "--platform", "vendor.PlainPlatform"]
    status, results, printed = run_forked([*device, "-k", "test_serving_while_sizes_are_made"], tmp_path)
    assert status == 0 and list(results.values()) == ["passes"], printed[-8000:]


@pytest.mark.once
def test_wrapped_functions_run_in_inference_mode(tmp_path: Path) -> None:
    """Inference mode is on in steps, in warm-up, and where adapters change between two steps."""
    (tmp_path / "vendor.py").write_text(IN_INFERENCE_MODE)
    device = ["vendor.PlainWorker", "--platform", "vendor.PlainPlatform"]
    status, results, printed = run_forked([*device, "-k", "test_lora and slots or test_pooling and adapters"], tmp_path)
    assert status == 0 and results, printed[-8000:]
    assert all(result.startswith("passes") for result in results.values()), printed[-8000:]


@pytest.mark.newest
def test_platform_that_comes_too_late(tmp_path: Path) -> None:
    (tmp_path / "vendor.py").write_text("from vllm import LLM\nfrom examples.plain_device import PlainPlatform\n")
    status, _, printed = run(["vendor.PlainWorker", "--platform", "vendor.PlainPlatform"], tmp_path)
    assert status == 4 and "ERROR: vendor.PlainPlatform must be defined above the imports" in printed, printed[-3000:]


@pytest.mark.in_turns
@pytest.mark.once
def test_as_a_plugin(tmp_path: Path) -> None:
    """A vendor's own tests run the checks by pytest's own command; without ``--worker`` the plugin does nothing."""
    (tmp_path / "test_own.py").write_text("def test_own() -> None:\n    pass\n")
    plugin = [sys.executable, "-m", "pytest", "-p", "model_runner_base.testing.plugin", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run_in = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    alone = subprocess.run([*plugin, "test_own.py"], **run_in)
    assert alone.returncode == 0 and "1 passed" in alone.stdout and "Conformance" not in alone.stdout, alone.stdout
    checks = ["--pyargs", "model_runner_base.testing.checks", "test_own.py", "-k", "test_own or test_presence"]
    both = subprocess.run([*plugin, "--worker", *PLAIN, *checks], **run_in)
    assert both.returncode == 0 and "5 passed" in both.stdout, both.stdout + both.stderr
    assert "Conformance of examples.plain_device.PlainWorker" in both.stdout


def test_an_operator_that_a_device_lacks_is_no_refusal() -> None:
    """An operator that a device lacks would, in a server, end the engine in the middle of a step."""
    for operator in (
        lambda: torch.ops.aten.sort.stable(torch.eye(3).to_sparse(), stable=True),
        lambda: torch.softmax(torch.ones(2, dtype=torch.int32), 0),
        lambda: torch.ones(2, device="meta").cpu(),
    ):
        with pytest.raises(NotImplementedError) as raised:
            operator()
        assert refusal(raised.value) is None
    assert refusal(NotImplementedError("sorting is not supported on this device")) is not None
