"""vLLM's own tests on the example device: a user sees which pass, and what is wrong with a list, in a line."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from kit_runs import PLAIN

from docs_build import upstream_results
from model_runner_base.testing.upstream import __main__ as command
from model_runner_base.testing.upstream import plugin, servers, source
from model_runner_base.testing.upstream.allow_list import (
    LISTS,
    AllowList,
    ListError,
    matching,
    read_list,
    shipped_list,
)
from model_runner_base.testing.upstream.overrides import Overrides
from model_runner_base.testing.upstream.plugin import AllowedTests
from model_runner_base.testing.upstream.source import SourceError, installed_release, source_of
from model_runner_base.testing.upstream.table import ResultTable

ROOT = Path(__file__).parents[2]
FILE = "v1/sample/test_sampling_params_e2e.py"

LOADS = "v1/kv_connector/unit/test_invalid_blocks_correctness.py"
"""Tests of requests whose blocks were not loaded."""

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


@pytest.mark.parametrize(("path", "least"), [(FILE, 7), (LOADS, 3)])
def test_tests_of_vllm_pass(path: str, least: int, tmp_path: Path) -> None:
    """Tests of engines on the device, and tests of schedulers: vLLM's connectors meet this library's there."""
    file = tmp_path / "results.json"
    status, printed = run([*PLAIN, "--files", path, "--results", str(file)])
    assert status == 0, printed[-4000:]
    results = json.loads(file.read_text())[path]
    assert results["passed"] >= least
    assert results["failed"] == {}


@pytest.mark.once
def test_a_faulty_device_fails_a_test(tmp_path: Path) -> None:
    (tmp_path / "faulty_device.py").write_text(FAULTY)
    worker = ["faulty_device.PlainWorker", *PLAIN[1:]]
    status, printed = run([*worker, "--files", FILE, "-k", "test_bad_words"], tmp_path)
    assert status == 1, printed[-4000:]
    assert f"FAILS {FILE}::test_bad_words: " in printed


@pytest.mark.once
def test_relative_paths(tmp_path: Path) -> None:
    """Paths of the command are those of the folder that it is started in."""
    (tmp_path / "list.toml").write_text('[models]\n[files."mine/test_mine.py"]')
    for name in ["mine/test_mine.py", "v1/test_v1.py", *read_list(shipped_list(installed_release())).files]:
        file = tmp_path / "source" / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def test_a(): pass\ndef test_b(): pass\n")
    options = ["--source", "source", "--list", "list.toml", "--results", "results.json", "--files", "mine/"]
    status, printed = run([*PLAIN, *options, "-k", "test_a"], tmp_path)
    assert status == 0, printed[-4000:]
    assert "Warning" not in printed
    results = json.loads((tmp_path / "results.json").read_text())["mine/test_mine.py"]
    assert (results["passed"], results["left_out"]) == (1, 1)


def test_a_path_that_the_list_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pytest takes paths, too. One that is not listed is an error in a line."""
    (tmp_path / "tests").mkdir()
    for name in ("listed.py", "other.py"):
        (tmp_path / "tests" / name).write_text("def test_x(): pass\n")
    tests = AllowedTests(AllowList(models={}, files={"listed.py": {}}), tmp_path, mock.Mock(), 60)
    files = [str(tmp_path / "tests" / name) for name in ("listed.py", "other.py::test_x")]
    surroundings = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    assert pytest.main([*surroundings, *files], plugins=[tests]) == pytest.ExitCode.USAGE_ERROR
    printed = "".join(capsys.readouterr()).strip()
    assert printed == f"ERROR: {files[1]} is no file of the list: choose among those with --files and -k"


SCHEDULERS = """
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

NAMES = [cls.__name__ for each in (Scheduler, AsyncScheduler) for cls in each.__mro__[1:2]]

def test_which():
    from vllm.v1.core.sched.scheduler import Scheduler as now
    assert (NAMES, now) == ({names}, Scheduler)

def test_limits():
    VllmConfig()
"""


def test_schedulers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of tests of schedulers gets this library's, and no limits of the device; the next file does not."""
    import vllm.platforms

    class Limited(type(vllm.platforms.current_platform)):  # type: ignore[misc]
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            raise ValueError("refused here")

    monkeypatch.setattr(vllm.platforms, "current_platform", Limited())
    (tmp_path / "tests").mkdir()
    names = {"a.py": ["RowScheduler", "AsyncRowScheduler"], "b.py": ["SchedulerInterface", "Scheduler"]}
    for name, expected in names.items():
        (tmp_path / "tests" / name).write_text(SCHEDULERS.replace("{names}", str(expected)))
    allowed = AllowList(models={}, files={"a.py": {"schedulers": True}, "b.py": {}})
    tests = AllowedTests(allowed, tmp_path, mock.MagicMock(), 60)
    results = ResultTable(tests, tmp_path, None)
    surroundings = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    pytest.main([*surroundings, *(str(tmp_path / "tests" / name) for name in names)], plugins=[tests, results])
    assert (results.files["a.py"].passed, results.files["a.py"].failed) == (2, {})
    assert results.files["b.py"].passed == 1
    assert [*results.files["b.py"].failed] == ["test_limits"]


SLOW = """
import asyncio, time
import pytest, pytest_asyncio

@pytest_asyncio.fixture
async def number():
    yield 3

@pytest.mark.asyncio
async def test_fast(number):
    assert number == 3

@pytest.mark.asyncio
async def test_waits(number):
    await asyncio.sleep(60)

@pytest.mark.asyncio
async def test_goes_on_after_an_error(number):
    asyncio.get_running_loop().call_soon(time.sleep, 60)  # A loop logs errors of callbacks.
    await asyncio.sleep(60)
"""


def test_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous test that waits for ever fails in time, and the next one runs."""
    monkeypatch.setattr(plugin, "AGAIN", 0.3)
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "slow.py"
    file.write_text(SLOW)
    tests = AllowedTests(AllowList(models={}, files={"slow.py": {}}), tmp_path, mock.MagicMock(), 1)
    results = ResultTable(tests, tmp_path, None)
    started = time.monotonic()
    surroundings = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-p", "pytest_asyncio"]
    assert pytest.main([*surroundings, str(file)], plugins=[tests, results]) == pytest.ExitCode.TESTS_FAILED
    assert time.monotonic() - started < 20
    assert results.files["slow.py"].passed == 1
    late = "TimeoutError: not done after 1 seconds"
    assert results.files["slow.py"].failed == {"test_waits": late, "test_goes_on_after_an_error": late}


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) < 2:
    print(subprocess.Popen([sys.executable, __file__, "grandchild"]).pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A child process that ignores SIGTERM, and the process that it started."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    child = subprocess.Popen([sys.executable, str(tmp_path / "stubborn.py")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = psutil.Process(int(child.stdout.readline()))
    yield child, grandchild
    servers.end([grandchild, *servers.tree_of(child.pid)])
    child.communicate()


def test_no_process_is_left(stubborn: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    """A server that a test leaves does not keep the device from the next file; other processes go on."""
    child, grandchild = stubborn
    others = {process.pid for process in psutil.Process().children()} - {child.pid}
    bystander = subprocess.Popen(["sleep", "60"])
    plugin.end_engines({bystander.pid, *others})
    assert child.poll() is not None and not grandchild.is_running()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_server_that_is_slow_to_end(stubborn: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    """Processes that a server started end with it, even if it alone is killed, or an error comes between."""

    class Server:
        def __init__(self, model: str, vllm_serve_args: list[str]) -> None:
            self.proc = stubborn[0]

        def __exit__(self, *error: object) -> None:
            self.proc.kill()
            raise TimeoutError

    servers.change_servers(Server, lambda given: {})
    with pytest.raises(TimeoutError):
        Server("m", []).__exit__(None, None, None)
    assert stubborn[0].poll() is not None and not stubborn[1].is_running()


def test_a_module_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "NEEDED", ("pytest", "no_such_module"))
    assert command.main(["my_package.MyWorker"]) == 2
    assert capsys.readouterr().err == 'no_such_module is missing: pip install "model-runner-base[testing]"\n'


def test_options_of_servers() -> None:
    """Servers of vLLM's tests have the options of engines; one whose start fails leaves no process."""

    class Server:
        def __init__(self, model: str, vllm_serve_args: list[str], *, seed: int = 0, fails: bool = False) -> None:
            self.arguments, self.seed = vllm_serve_args, seed
            assert "--seed" not in vllm_serve_args, "vLLM's class refuses it"
            if fails:
                self.proc = subprocess.Popen(["sleep", "60"])
                started.append(self.proc)
                raise RuntimeError("not ready")

        def __exit__(self, *error: object) -> None:
            pass

    started: list[subprocess.Popen[bytes]] = []
    options: dict[str, Any] = {
        "enforce_eager": True,
        "async_scheduling": False,
        "kv_cache_memory_bytes": 64,
        "compilation_config": {},
    }
    options |= {"disable_log_stats": False, "quantization": None}  # Flags cannot say either.
    overrides = Overrides("float32", {"max_num_seqs": 8, "seed": 3, "enable_prefix_caching": False}, options)
    overrides.change_servers(Server)
    expected = "--seed=1 --dtype float32 --max-num-seqs 8 --enforce-eager --no-async-scheduling "
    expected += "--kv-cache-memory-bytes 64 --compilation-config {}"
    given = ["--enable-prefix-caching", "--seed=1"]
    assert Server("m", given).arguments == ["--enable-prefix-caching", *expected.split()]
    file = AllowList(models={}, files={"x.py": {"engine": {"seed": 5}}}).files["x.py"]
    with overrides.of(file):
        assert Server("m", []).seed == 5
    with pytest.raises(RuntimeError, match="not ready"):
        Server("m", [], fails=True)
    assert started[0].poll() is not None


def test_recorded_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a list does not have any more are dropped; a run of some of a file's tests is refused."""
    monkeypatch.setattr(upstream_results, "FILE", tmp_path / "recorded.json")
    found = dict.fromkeys(upstream_results.COUNTS, 3)
    (tmp_path / "recorded.json").write_text(json.dumps({"device, vLLM 0.16": {"gone.py": found}}))
    (tmp_path / "results.json").write_text(json.dumps({FILE: found}))
    upstream_results.record("device, vLLM 0.16", [tmp_path / "results.json"])
    assert upstream_results.load() == {"device, vLLM 0.16": {FILE: found}}
    (tmp_path / "results.json").write_text(json.dumps({FILE: found | {"left_out": 2}}))
    with pytest.raises(ValueError, match=r"2 tests of .* did not run"):
        upstream_results.record("device, vLLM 0.16", [tmp_path / "results.json"])


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
    cache, own = tmp_path / "cache", tmp_path / "own"
    with pytest.raises(SourceError, match=r"0\.16\.0 .*cache does not have it yet: give that file, .*, as --source$"):
        source_of("0.16.0", cache, own)
    with pytest.raises(SourceError, match=r"has no tests/v1: --source needs the source of vLLM 0\.16\.0$"):
        source_of("0.16.0", cache, own, tmp_path)


def archive_in(folder: Path) -> Path:
    """Makes a source distribution of vLLM 0.16.0 with one test."""
    test = folder / "made" / "tests" / "v1" / "test_x.py"
    test.parent.mkdir(parents=True)
    test.write_bytes(os.urandom(4096))
    with tarfile.open(folder / "vllm.tar.gz", "w:gz") as tar:
        tar.add(folder / "made", "vllm-0.16.0")
    return folder / "vllm.tar.gz"


@pytest.mark.parametrize("fault", ["no archive", "ends early"])
def test_a_broken_archive(fault: str, tmp_path: Path) -> None:
    """A file that is not whole, or something else, is named in a line."""
    archive = archive_in(tmp_path)
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2] if fault == "ends early" else b"no archive")
    with pytest.raises(SourceError, match=r"^.*vllm\.tar\.gz is no source distribution of vLLM that can be read: .*$"):
        source_of("0.16.0", tmp_path / "cache", tmp_path / "own", archive)


def test_a_hash_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that is not what the index names is not run."""
    archive, page = archive_in(tmp_path), tmp_path / "index.html"
    archive.rename(tmp_path / "vllm-0.16.0.tar.gz")
    right = hashlib.sha256((tmp_path / "vllm-0.16.0.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(page))
    page.write_text(f'<!DOCTYPE html><a href="vllm-0.16.0.tar.gz#sha256={"0" * 64}">vllm</a>')
    with pytest.raises(SourceError, match=r"vllm-0\.16\.0\.tar\.gz does not have the sha256 that the index names"):
        source_of("0.16.0", tmp_path / "cache", tmp_path / "a")
    page.write_text(f'<!DOCTYPE html><a href="vllm-0.16.0.tar.gz#sha256={right}">vllm</a>')
    assert source_of("0.16.0", tmp_path / "cache", tmp_path / "b") == tmp_path / "cache" / "0.16.0"


def test_runs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that start together download once, and no later run changes the tests that they run from."""
    archive, downloads = archive_in(tmp_path), []

    def download(release: str, cache: Path, own: Path) -> Path:
        downloads.append(own)
        time.sleep(0.2)
        return archive

    monkeypatch.setattr(source, "_download", download)
    cache = tmp_path / "cache"
    (cache / "0.16.0.partial").mkdir(parents=True)  # Left by a run that was killed.
    with ThreadPoolExecutor() as pool:
        roots = list(pool.map(lambda own: source_of("0.16.0", cache, own), [tmp_path / "a", tmp_path / "b"]))
    assert roots == [cache / "0.16.0"] * 2
    assert len(downloads) == 1
    assert (roots[0] / "tests" / "v1" / "test_x.py").is_file()
    assert not (cache / "0.16.0.partial").exists()
    (roots[0] / "mark").touch()
    given = source_of("0.16.0", cache, tmp_path / "c", archive)
    assert given.is_relative_to(tmp_path / "c")
    assert (given / "tests" / "v1" / "test_x.py").is_file()
    assert (roots[0] / "mark").exists()
