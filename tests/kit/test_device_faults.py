"""The conformance kit catches deliberate faults in a vendor's code, each in a device of its own."""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from device_fault import KINDS, DeviceFault, variant
from device_faults import FAULTS
from forks import WITHOUT_SEARCH, Run, run_kit
from kernel_faults import COUNTS, COUNTS_CACHES, COUNTS_WEIGHTS, OWN_MEMORY
from lane import HAS_OPENXLA

from model_runner_base.testing.order import CHECKS

HERE = [fault for fault in FAULTS if fault.on_both_releases or fault.is_later is not HAS_OPENXLA]
"""Faults that this lane runs the kit with."""


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Run]]]:
    """The kit's runs on every faulty device that is tested, two at a time."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    faults = [item.callspec.params["fault"] for item in tests if item.originalname == "test_the_kit_catches"]  # type: ignore
    with ThreadPoolExecutor(2) as pool:
        yield {
            fault.name: pool.submit(run_with, fault, tmp_path_factory.mktemp("devices", numbered=True))
            for fault in faults
        }
        pool.shutdown(wait=False, cancel_futures=True)


def run_with(fault: DeviceFault, directory: Path) -> Run:
    """Runs the kit on the device with the fault, up to the first failure."""
    (directory / "faulty_device.py").write_text(fault.module)
    device = ["faulty_device.PlainWorker", "--platform", "faulty_device.PlainPlatform"]
    options = ["-x", "--no-shrinking", "--assert=plain", *WITHOUT_SEARCH, "-k", fault.selection, *fault.options]
    return run_kit([*device, *options], directory, timeout_s=600, VLLM_PLUGINS="", COLUMNS="1000")


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("fault", HERE, ids=lambda fault: fault.name)
def test_the_kit_catches(fault: DeviceFault, verdicts: dict[str, Future[Run]]) -> None:
    """A fault of a device fails a row of the kit's table, whose message helps to find it."""
    run = verdicts[fault.name].result()
    assert run.status == 1, f"{run.status}: {run.printed[-3000:]}"
    messages = re.findall(r" FAILS\b.*", run.printed)
    assert len(messages) == 1 and re.search(fault.words, messages[0]), run.printed[-3000:]


COUNTED = variant(platform=OWN_MEMORY, ops=COUNTS_CACHES, runner=COUNTS_WEIGHTS, top=COUNTS)


@pytest.mark.once
def test_a_device_that_counts_its_own_memory(tmp_path: Path) -> None:
    """An engine starts by the figures of a device with memory of its own, and these pass."""
    run = run_with(DeviceFault("none", 0, COUNTED, "figures", ""), tmp_path)
    assert run.status == 0 and len(re.findall(r" passes ", run.printed)) == 3, run.printed[-3000:]


@pytest.mark.once
def test_a_device_on_which_no_engine_starts(tmp_path: Path) -> None:
    """The run of a device that refuses every engine ends after one row, with the device's words, and fails."""
    module = variant(runner="def load_model(self):\n    raise NotImplementedError('models are not supported today')")
    run = run_with(DeviceFault("none", 0, module, "test_start or test_equality", ""), tmp_path)
    rows = re.findall(r"  (?:passes|FAILS|not supported)  .*", run.printed)
    assert run.status == 1 and len(rows) == 1 and "models are not supported today" in rows[0], run.printed[-3000:]
    assert "the device refuses this engine, so no further check is run" in run.printed


@pytest.mark.once
def test_a_vendors_own_tests_run_after_a_start_that_fails(tmp_path: Path) -> None:
    """A vendor's own tests in the same session run, though the kit has ended; they come after its first groups."""
    module = variant(runner="def load_model(self):\n    raise RuntimeError('kernel library not found')")
    (tmp_path / "faulty_device.py").write_text(module)
    own = "def test_own_first() -> None:\n    pass\n\n\ndef test_own_second() -> None:\n    raise ValueError('own')\n"
    (tmp_path / "test_own.py").write_text(own)
    device = ["faulty_device.PlainWorker", "--platform", "faulty_device.PlainPlatform"]
    chosen = ["-k", "test_start or test_equality or test_soak or test_own", str(CHECKS), "test_own.py"]
    run = run_kit([*device, *chosen], tmp_path, timeout_s=600, VLLM_PLUGINS="", COLUMNS="1000")
    assert run.status == 1 and re.search(r"2 failed, 1 passed[, ]", run.printed), run.printed[-3000:]
    rows = re.findall(r"^  (\w+) .*  (passes|FAILS)  .*", run.printed, re.MULTILINE)
    assert rows == [("start", "FAILS"), ("own", "passes"), ("own", "FAILS")], run.printed[-3000:]


@pytest.mark.once
def test_each_fault_has_a_name_and_a_kind_of_bug() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.kind for fault in FAULTS} <= KINDS.keys()


@pytest.mark.once
def test_a_hook_that_raises(tmp_path: Path) -> None:
    """The row of whichever check starts the engine says that none starts, and in which hook."""
    module = variant(runner="def profile_run(self):\n    raise RuntimeError('out of registers')")
    run = run_with(DeviceFault("none", 0, module, "test_zeros", ""), tmp_path)
    assert "the engine does not start, in profile_run: RuntimeError: out of registers" in run.printed


MEASURES = variant(runner="def profile_run(self):\n    self.profile_step()\n    return super().profile_run()")


@pytest.mark.once
def test_a_device_that_measures_its_largest_step(tmp_path: Path) -> None:
    """A device that runs the largest step before there are caches starts every kind of model, and serves it."""
    kinds = "test_starts or test_latents_of_one or (test_log_prob and llava) or test_classes or hybrid or test_answers"
    options = ("--profile", "smoke")
    run = run_with(DeviceFault("none", 0, MEASURES, kinds, "", options), tmp_path)
    assert run.status == 0, run.printed[-3000:]
