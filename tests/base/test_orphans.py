"""Processes of engines end with the process that started them, whatever they do when it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from conftest import BUNDLED_MODEL
from lane import ROOT, WITH_PLAIN_PLATFORM

from model_runner_base.testing.orphans import check_all_end

ENGINE = """
import os, sys, threading, time
from vllm import LLM, SamplingParams
from held_device import say

def start(**options):
    return LLM(
        sys.argv[1], worker_cls="held_device.HeldWorker", skip_tokenizer_init=True, max_model_len=64,
        max_num_batched_tokens=64, max_num_seqs=1, kv_cache_memory_bytes=1 << 21, **options,
    )

def generate(llm):
    params = SamplingParams(max_tokens=3, detokenize=False)
    return llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)[0].outputs[0].token_ids
"""
SCRIPTS = (
    ENGINE
    + """
for hook in ("load_model", "capture_model", "execute_model", "idle"):
    # Each is a script with an engine, in a process that has vLLM imported.
    if (pid := os.fork()) == 0:
        os.environ["HELD_HOOK"] = hook
        engines = []
        thread = threading.Thread(target=lambda: engines.append(start()))
        thread.start()
        thread.join()
        time.sleep(0.5)
        assert len(generate(engines[0])) == 3, "the engine ended with the thread that started it"
        if (bystander := os.fork()) == 0:
            time.sleep(600)
        say(f"bystander-{bystander}")
        say("idle0")
        time.sleep(600)
    say(f"{hook}-{pid}")
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the script held in {hook} ended by itself"
"""
)
RANKS = (
    ENGINE
    + """
if __name__ == "__main__":
    llm = start(tensor_parallel_size=2, enforce_eager=True)
    if (bystander := os.fork()) == 0:
        time.sleep(600)
    say(f"bystander-{bystander}")
    generate(llm)
"""
)


def wait_for(found: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while not found():
        ended = process.poll() is not None or time.monotonic() > deadline
        assert not ended, log.read_text(errors="replace")[-3000:]
        time.sleep(0.01)


@contextmanager
def running(command: list[str], folder: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Runs a command on the example device; yields its process and its log."""
    path = os.pathsep.join([str(ROOT / "tests" / "base"), WITH_PLAIN_PLATFORM["PYTHONPATH"]])
    own = WITH_PLAIN_PLATFORM | {"PYTHONPATH": path, "SAYS_IN": str(folder)} | environment
    usual = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=usual | own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process, log
    finally:
        for left in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()
        process.wait()


def pid_of(name: str, folder: Path) -> int:
    (said,) = folder.glob(f"{name}-*")
    return int(said.name.removeprefix(f"{name}-"))


def trackers_of(pid: int) -> list[psutil.Process]:
    """Python's own process that removes shared memory, once the last process is gone that may have some. A forked
    process may."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            if any("resource_tracker" in argument for argument in child.cmdline()):
                found.append(child)
    return found


def num_tied(pid: int) -> int:
    """Number of processes that end with a process: it has both ends of a pipe for each."""
    flags = []
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(OSError):
            flags.append(int(info.read_text().split("flags:")[1].split()[0], 8))
    return sum(bool(each & os.O_ASYNC) for each in flags) // 2


@pytest.mark.once
def test_a_script(tmp_path: Path) -> None:
    """A script is killed while its engine loads, warms up or steps, and ends by SIGTERM when its engine is idle.

    The engine serves after the thread that started it has ended. A process of the user's that is forked from the script
    goes on, and keeps no engine alive.
    """
    with running([sys.executable, "-c", SCRIPTS, str(BUNDLED_MODEL)], tmp_path) as (scripts, log):
        for hook in ("load_model", "capture_model", "execute_model", "idle"):
            wait_for((tmp_path / f"{hook}0").exists, scripts, log)
            wait_for(lambda hook=hook: bool([*tmp_path.glob(f"{hook}-*")]), scripts, log)
            script = psutil.Process(pid_of(hook, tmp_path))
            if hook != "idle":
                check_all_end(script)
                continue
            bystander = psutil.Process(pid_of("bystander", tmp_path))
            try:
                spared = [each.pid for each in (bystander, *trackers_of(script.pid))]
                check_all_end(script, spared=spared, by=signal.SIGTERM)
                assert bystander.is_running() and bystander.status() != psutil.STATUS_ZOMBIE
            finally:
                bystander.kill()
        assert scripts.wait(30) == 0


@pytest.mark.once
def test_ranks(tmp_path: Path) -> None:
    """Two ranks that are in a step end with the script that has the engine, and leave no shared memory.

    A process that was forked from the script goes on, and keeps no rank alive.
    """
    (tmp_path / "script.py").write_text(RANKS)
    command = [sys.executable, str(tmp_path / "script.py"), str(BUNDLED_MODEL)]
    shared = set(os.listdir("/dev/shm"))
    own = {"HELD_HOOK": "execute_model", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with running(command, tmp_path, **own) as (script, log):
        for rank in range(2):
            wait_for((tmp_path / f"execute_model{rank}").exists, script, log)
        bystander = psutil.Process(pid_of("bystander", tmp_path))
        # Which names are this engine's: processes of other tests make some, too.
        mapped = {
            Path(each.path).name
            for child in psutil.Process(script.pid).children(recursive=True)
            for each in child.memory_maps()
            if each.path.startswith("/dev/shm/")
        }
        assert mapped - shared
        trackers = trackers_of(script.pid)
        try:
            check_all_end(psutil.Process(script.pid), spared=[each.pid for each in (bystander, *trackers)])
        finally:
            bystander.kill()
        psutil.wait_procs(trackers, timeout=30)
    assert not (mapped - shared) & set(os.listdir("/dev/shm"))


@pytest.mark.newest
def test_ranks_that_start(tmp_path: Path) -> None:
    """Two ranks that are still importing end with the script, whose engine core is a process of its own."""
    (tmp_path / "script.py").write_text(RANKS)
    command = [sys.executable, str(tmp_path / "script.py"), str(BUNDLED_MODEL)]
    with running(command, tmp_path) as (script, log):

        def are_tied() -> bool:
            cores = [each for each in psutil.Process(script.pid).children() if num_tied(each.pid) == 2]
            return len(cores) == 1

        wait_for(are_tied, script, log)
        check_all_end(psutil.Process(script.pid))


@pytest.mark.newest
def test_a_server_that_starts(tmp_path: Path) -> None:
    """An engine core and two API servers that are still importing vLLM end with ``vllm serve``."""
    options = ["--max-model-len", "64", "--api-server-count", "2"]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(BUNDLED_MODEL), *options]
    with running(command, tmp_path) as (server, log):
        wait_for(lambda: num_tied(server.pid) == 3, server, log)
        check_all_end(psutil.Process(server.pid))
