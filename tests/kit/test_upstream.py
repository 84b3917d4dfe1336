"""vLLM's own tests on the example device: a user sees which pass, and what is wrong with a list, in a line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_runner_base.testing.upstream.allow_list import LISTS, ListError, matching, read_list, shipped_list
from model_runner_base.testing.upstream.source import SourceError, source_of

ROOT = Path(__file__).parents[2]
PLAIN = ["examples.plain_device.PlainWorker", "--platform", "examples.plain_device.PlainPlatform"]
FILE = "v1/sample/test_sampling_params_e2e.py"

FAULTY = """
from examples.plain_device import PlainWorker
from model_runner_base.heads.sampling.token_edits import TokenEdits
TokenEdits.asked_by = lambda self, params: False
"""
"""Worker that ignores bad words."""


def run(arguments: list[str], path: Path = ROOT, **environment: str) -> tuple[int, str]:
    """Runs the command; returns the exit status and everything printed."""
    # This repository's other tests run engines in their own process.
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    out = subprocess.run(
        [sys.executable, "-m", "model_runner_base.testing.upstream", *arguments],
        env={**inherited, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "COLUMNS": "150", **environment},
        cwd=path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return out.returncode, out.stdout + out.stderr


def test_tests_of_vllm_pass(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    status, printed = run([*PLAIN, "--files", FILE, "--results", str(file)])
    assert status == 0, printed[-4000:]
    results = json.loads(file.read_text())[FILE]
    assert results["passed"] >= 7
    assert results["failed"] == {}


def test_a_faulty_device_fails_a_test(tmp_path: Path) -> None:
    (tmp_path / "faulty_device.py").write_text(FAULTY)
    worker = ["faulty_device.PlainWorker", *PLAIN[1:]]
    status, printed = run([*worker, "--files", FILE, "-k", "test_bad_words"], tmp_path)
    assert status == 1, printed[-4000:]
    assert f"FAILS {FILE}::test_bad_words: " in printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models]\n[files.x]\nexpekted = {}", "files > x > expekted: Extra inputs are not permitted"),
        ("[models]\n[files]", "files: Dictionary should have at least 1 item"),
        ("[models\n", "Expected ']' at the end of a table declaration"),
    ],
)
def test_a_broken_list(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(ListError) as raised:
        read_list(tmp_path / "list.toml")
    assert str(raised.value).startswith(f"{tmp_path}/list.toml: {words}")
    assert "\n" not in str(raised.value)


def test_shipped_lists() -> None:
    """Lists of both releases can be read, and each entry has a reason."""
    for path in LISTS.glob("*.toml"):
        listed = read_list(path)
        entries = [file.expected | file.not_run for file in listed.files.values()]
        assert all(reason for entry in entries for reason in entry.values())
    with pytest.raises(ListError, match=r"no list for vLLM 9\.1\.0, only for 0\.16, 0\.33"):
        shipped_list("9.1.0")


def test_an_own_list_goes_before(tmp_path: Path) -> None:
    (tmp_path / "list.toml").write_text(f'[models]\nx = "y"\n[files."{FILE}".expected]\ntest_seed = "no seeds yet"')
    joined = read_list(shipped_list("0.16.0")).joined(read_list(tmp_path / "list.toml"))
    assert joined.files[FILE].expected["test_seed"] == "no seeds yet"
    assert len(joined.files) > 20
    assert matching({"test_x[1": "", "test_y": ""}, "test_x[1-2]") is None
    assert matching({"test_x*": "", "test_y": ""}, "test_y[1-2]") == "test_y"


def test_no_network_and_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceError, match=r"0\.16\.0 .*does not have it yet: give that file, .*, as --source$"):
        source_of("0.16.0", tmp_path)
    with pytest.raises(SourceError, match=r"has no tests/v1: --source needs the source of vLLM 0\.16\.0$"):
        source_of("0.16.0", tmp_path, tmp_path)
    (tmp_path / "vllm.tar.gz").write_text("no archive")
    with pytest.raises(SourceError, match=r"vllm\.tar\.gz is no source distribution of vLLM that can be read"):
        source_of("0.16.0", tmp_path, tmp_path / "vllm.tar.gz")
