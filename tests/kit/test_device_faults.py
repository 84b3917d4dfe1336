"""The conformance kit catches deliberate faults in a vendor's code, each in a device of its own."""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from device_fault import KINDS, DeviceFault
from device_faults import FAULTS
from forks import Run, run_kit
from lane import HAS_OPENXLA

HERE = [fault for fault in FAULTS if fault.on_both_releases or fault.is_later is not HAS_OPENXLA]
"""Faults that this lane runs the kit with."""


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Run]]]:
    """The kit's runs on every faulty device that is tested, two at a time."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == "test_the_kit_catches"]
    faults = [item.callspec.params["fault"] for item in tests if "fault" in item.callspec.params]  # type: ignore
    with ThreadPoolExecutor(2) as pool:
        yield {
            fault.name: pool.submit(run_with, fault, tmp_path_factory.mktemp("devices", numbered=True))
            for fault in faults
        }
        pool.shutdown(wait=False, cancel_futures=True)


def run_with(fault: DeviceFault, directory: Path) -> Run:
    """Runs the kit on the device with the fault, up to the first failure."""
    (directory / "faulty_device.py").write_text(fault.module)
    device = ["faulty_device.PlainWorker", "--platform", "faulty_device.PlainPlatform", *fault.options]
    options = ["-x", "--no-shrinking", "--assert=plain", "-k", fault.selection]
    return run_kit([*device, *options], directory, timeout_s=600, VLLM_PLUGINS="", COLUMNS="1000")


@pytest.mark.parametrize("fault", HERE, ids=lambda fault: fault.name)
def test_the_kit_catches(fault: DeviceFault, verdicts: dict[str, Future[Run]]) -> None:
    """A fault of a device fails a row of the kit's table, whose message helps to find it."""
    run = verdicts[fault.name].result()
    assert run.status == 1, f"{run.status}: {run.printed[-3000:]}"
    messages = re.findall(r" FAILS\b.*", run.printed)
    assert len(messages) == 1 and re.search(fault.words, messages[0]), run.printed[-3000:]


@pytest.mark.once
def test_each_fault_has_a_name_and_a_kind_of_bug() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.kind for fault in FAULTS} <= KINDS.keys()
