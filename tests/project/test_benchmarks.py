"""Benchmarks of the host's step print what their documents name; no time is tested. ``dev.py check`` types all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ["decode_8_async", "mixed"]


def test_cases_of_the_host_step() -> None:
    command = [sys.executable, "-m", "benchmarks.host.step", "--json", "--steps", "4", "--cases", *CASES]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    cases = json.loads(out.stdout.splitlines()[-1])["cases"]
    assert sorted(cases) == sorted(CASES)
    for figures in cases.values():
        stock, ours = (
            sum(figures[f"{side}_{part}_us"] for part in ("schedule", "runner", "update")) for side in ("stock", "ours")
        )
        assert figures["sum_ratio"] == pytest.approx(stock / ours, rel=0.01)


def test_a_whole_server() -> None:
    command = [sys.executable, "-m", "benchmarks.serve", "--quick", "--json", "--sides", "ours"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    (row,) = json.loads(out.stdout.splitlines()[-1])["rows"]
    assert row["tokens_per_s"] > 0 and row["itl_p50_ms"] <= row["itl_p99_ms"]
    assert all(0 < row[process] < 2 for process in ("api_server", "engine_core", "client"))
