"""The benchmarks of the host's step run, and print what their documents name; how fast anything is, is not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def last_object(module: str, *arguments: str) -> dict:
    """What ``--json`` prints last."""
    out = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--json", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["decode_8", "decode_8_async", "mixed"])
def test_a_case_of_the_host_step(case: str) -> None:
    figures = last_object("host_step", "--steps", "4", "--cases", case)["cases"][case]
    parts = ("schedule", "runner", "update")
    stock, ours = (sum(figures[f"{side}_{part}_us"] for part in parts) for side in ("stock", "ours"))
    assert figures["sum_ratio"] == pytest.approx(stock / ours, rel=0.01)
