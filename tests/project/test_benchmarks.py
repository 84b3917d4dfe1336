"""Benchmarks of the host's step print what their documents name; no time is tested. ``dev.py check`` types all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lane import HAS_OPENXLA

from benchmarks.real.parts import seconds_of_parts

ROOT = Path(__file__).parents[2]


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["decode_8_async", "mixed"], marks=pytest.mark.once, id="first runner"),
        pytest.param(["decode_8"], marks=pytest.mark.newest, id="second runner"),
    ],
)
def test_cases_of_the_host_step(cases: list[str]) -> None:
    """The command fails unless both sides prepare the same steps. vLLM's second runner is raced where vLLM has it."""
    command = [sys.executable, "-m", "benchmarks.host.step", "--json", "--quick", "--cases", *cases]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    results = json.loads(out.stdout.splitlines()[-1])["cases"]
    assert sorted(results) == sorted(cases)
    for figures in results.values():
        stock, ours = (
            sum(figures[f"{side}_{part}_us"] for part in ("schedule", "runner", "update")) for side in ("stock", "ours")
        )
        assert figures["sum_ratio"] == pytest.approx(stock / ours, rel=0.01)
        # Kernels of block tables, positions, tokens, slots, and states that move on.
        assert HAS_OPENXLA or figures["triton_launches"] >= 5


@pytest.mark.once
def test_a_whole_server() -> None:
    command = [sys.executable, "-m", "benchmarks.serve", "--quick", "--json", "--sides", "ours"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    (row,) = json.loads(out.stdout.splitlines()[-1])["rows"]
    assert row["tokens_per_s"] > 0 and row["itl_p50_ms"] <= row["itl_p99_ms"]
    assert all(0 < row[process] < 2 for process in ("api_server", "engine_core", "client"))


@pytest.mark.once
def test_time_goes_to_the_innermost_part_of_a_step(tmp_path: Path) -> None:
    """Calls inside of a linear layer count for the layer, and the time between two steps for neither."""
    calls = [
        ("model_runner_base/model_runner.py(9): execute_model", 0, 100),
        ("model_runner_base/attention/paged.py(9): forward", 10, 30),
        ("aten::bmm", 15, 5),
        ("vllm/model_executor/layers/linear.py(9): forward", 50, 20),
        ("vllm/model_executor/layers/utils.py(9): gemm", 55, 15),
        ("model_runner_base/model_runner.py(9): execute_model", 150, 50),
    ]
    events = [{"cat": "cpu_op", "tid": 1, "name": name, "ts": ts, "dur": dur} for name, ts, dur in calls]
    elsewhere = {"cat": "cpu_op", "tid": 2, "name": "aten::copy_", "ts": 0, "dur": 500}
    serving = {"cat": "python_function", "tid": 1, "name": "model_runner_base/testing/server.py", "ts": 0, "dur": 900}
    for name, of_process in (("7-rank-0.trace.json", [*events, elsewhere]), ("vm.async_llm.trace.json", [serving])):
        (tmp_path / name).write_text(json.dumps({"traceEvents": of_process}))
    seconds = {part: value for part, value in seconds_of_parts(tmp_path).items() if value}
    expected = {"attention": 30e-6, "linear layers": 20e-6, "rest of the step": 100e-6, "between steps": 50e-6}
    assert seconds == pytest.approx(expected)
