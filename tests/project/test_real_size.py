"""A model of real size is served with default flags: 0.6 billion parameters, a context of 40,960, dummy weights."""

import json
import subprocess
import sys

import pytest
import torch
from lane import ROOT

SHARE = 1.3
"""Largest ratio of the memory in use to what is announced."""
API_SERVER_GIB = 1.5
"""Python, torch and vLLM in the process that is no worker."""


@pytest.mark.newest  # PJRT CPU compiles for three minutes of both cores first.
def test_it_starts_and_stays_within_what_it_announces() -> None:
    """Requests of one chunk and of several are served, and memory stays within weights, step and KV cache."""
    command = [sys.executable, "-m", "benchmarks.real", "Qwen3-0.6B", "--requests", "1x20+4", "1x600+4", "--json"]
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        command.append("--option=--dtype=float32")  # Emulated, bfloat16 takes minutes.
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
    start, *groups = json.loads(run.stdout.splitlines()[-1])["rows"]
    weights, step, cache = start["weights"], start["largest step"], start["KV cache"]
    assert 1 < weights < 3 and step < 1.1 < cache
    assert [group["what"] for group in groups] == ["1x20+4", "1x600+4"]
    assert groups[-1]["peak GiB"] < SHARE * (weights + step + cache) + API_SERVER_GIB
