"""The conformance kit on this device, in a process of its own."""

import subprocess
import sys


def test_conformance() -> None:
    kit = [sys.executable, "-m", "model_runner_base.testing", "acme_device.worker.AcmeWorker"]
    assert subprocess.run(kit).returncode == 0
