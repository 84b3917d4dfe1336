"""benchmarks.gpu without a GPU: the rehearsal runs end to end, and a fault in a runner is reported as one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.cases import compare_tokens

ROOT = Path(__file__).parents[2]

FAULTY = """
import os
from examples.plain_device import PlainWorker


class Faulty(PlainWorker):
    '''Says another token than the model's, and dies on the model of the memory section.'''

    def load_model(self):
        if self.model_config.get_vocab_size() == 128:
            os._exit(9)
        super().load_model()

    def sample_tokens(self, grammar_output):
        output = super().sample_tokens(grammar_output)
        return Wrong(output) if hasattr(output, "get_output") else wrong(output)


def wrong(output):
    output.sampled_token_ids = [[(token + 1) % 512 for token in tokens] for tokens in output.sampled_token_ids]
    return output


class Wrong:
    def __new__(cls, output):
        get_output = output.get_output
        output.get_output = lambda: wrong(get_output())
        return output
"""


def run(*options: str, path: Path | None = None) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON object, and everything before it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(path or ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--json", "--minutes", "60", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    return done.returncode, json.loads(lines[-1]), "\n".join(lines[:-1])


@pytest.mark.full
def test_rehearsal() -> None:
    status, results, table = run()
    assert status == 0
    assert results["rehearsal"] and results["host"]["vllm"] == vllm.__version__
    assert [row["status"] for row in results["tokens"]] == ["ok", "ok"]
    sizes = {row["what"]: row for row in results["memory"]}
    assert sizes["kv_bytes"]["vllm"] == sizes["kv_bytes"]["ours"] > 0 and sizes["kv_bytes"]["met"]
    assert sizes["capture_s"]["ours"] > 0
    assert {row["status"] for row in results["sleep"]} == {"not available here"}
    assert [(row["steps"], row["batch"]) for row in results["speed"]] == [("decode", 2), ("mixed", 2)]
    for row in results["speed"]:
        assert row["ratio"] == pytest.approx(row["ours_tok_s"] / row["vllm_tok_s"])
        # A step's host time is part of its time, but for the garbage of a noisy machine.
        assert row["ours_host_us"] > 0 and row["vllm_host_us"] > 0
    assert "0 failed" in table


@pytest.mark.full
def test_faults_are_reported(tmp_path: Path) -> None:
    (tmp_path / "faulty_device.py").write_text(FAULTY)
    status, results, table = run("--only", "tokens,memory", "--ours", "faulty_device.Faulty", path=tmp_path)
    assert status == 1
    assert [row["status"] for row in results["tokens"]] == ["FAILED", "FAILED"]
    assert {row["differing"] for row in results["tokens"]} == {"12 of 12"}
    (row,) = results["memory"]
    assert row["status"] == "FAILED" and "status 9" in row["detail"] and "[ours]" in row["detail"]
    assert "FAILED" in table and "3 failed" in table


def answer(*tokens: int, gaps: tuple[float, ...] = (1.0, 1.0, 1.0)) -> dict[str, Any]:
    return {"tokens": list(tokens), "gaps": list(gaps)}


@pytest.mark.parametrize(
    ("ours", "gaps", "tolerance", "status"),
    [
        ((1, 2, 3), (1.0, 1.0, 1.0), 0.0, "ok"),
        ((1, 5, 6), (1.0, 0.05, 1.0), 0.1, "ok"),
        # Only the first difference is judged, and by its own gap.
        ((1, 5, 6), (0.01, 0.5, 0.01), 0.1, "FAILED"),
        ((1, 5, 6), (1.0, 0.05, 1.0), 0.0, "FAILED"),
        ((1, 2), (0.0, 0.0, 0.0), 0.1, "FAILED"),
    ],
)
def test_a_tie_is_told_from_a_fault(
    ours: tuple[int, ...], gaps: tuple[float, ...], tolerance: float, status: str
) -> None:
    stock = [answer(1, 2, 3, gaps=gaps)]
    assert compare_tokens({"vllm": stock, "ours": [answer(*ours)]}, stock, tolerance)["status"] == status


def test_another_context_excuses_nothing() -> None:
    known = [answer(9, 2, 3, gaps=(0.0, 0.0, 0.0))]
    answers = {"vllm": [answer(1, 2, 3)], "ours": [answer(1, 5, 3)]}
    assert compare_tokens(answers, known, 0.1)["status"] == "FAILED"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("no CUDA device: ")
