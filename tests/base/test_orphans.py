"""Processes of engines end with the process that started them, whatever they do when it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from conftest import BUNDLED_MODEL
from lane import ROOT, WITH_PLAIN_PLATFORM

from model_runner_base.testing.orphans import check_all_end, children_with

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
    os.waitpid(pid, 0)
"""
)
RANKS = (
    ENGINE
    + """
if __name__ == "__main__":
    generate(start(tensor_parallel_size=2, enforce_eager=True))
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
            left.kill()
        process.kill()
        process.wait()


def pid_of(name: str, folder: Path) -> int:
    (said,) = folder.glob(f"{name}-*")
    return int(said.name.removeprefix(f"{name}-"))


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
                check_all_end(script, spared=bystander.pid, by=signal.SIGTERM)
                assert bystander.is_running() and bystander.status() != psutil.STATUS_ZOMBIE
            finally:
                bystander.kill()
        assert scripts.wait(30) == 0


def test_ranks(tmp_path: Path) -> None:
    """Two ranks that are in a step end with the script that is killed, and leave no shared memory."""
    (tmp_path / "script.py").write_text(RANKS)
    command = [sys.executable, str(tmp_path / "script.py"), str(BUNDLED_MODEL)]
    shared = set(os.listdir("/dev/shm"))
    with running(command, tmp_path, HELD_HOOK="execute_model") as (script, log):
        for rank in range(2):
            wait_for((tmp_path / f"execute_model{rank}").exists, script, log)
        # Which names are this engine's: processes of other tests make some, too.
        mapped = {
            Path(each.path).name
            for child in psutil.Process(script.pid).children(recursive=True)
            for each in child.memory_maps()
            if each.path.startswith("/dev/shm/")
        }
        check_all_end(psutil.Process(script.pid))
    assert not (mapped - shared) & set(os.listdir("/dev/shm"))


def test_a_server_whose_engine_has_just_been_started(tmp_path: Path) -> None:
    """An engine core that is still importing vLLM ends with ``vllm serve``."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(BUNDLED_MODEL), "--max-model-len", "64"]
    with running(command, tmp_path) as (server, log):
        process = psutil.Process(server.pid)
        wait_for(lambda: bool(children_with("--multiprocessing-fork", process)), server, log)
        time.sleep(0.2)
        check_all_end(process)
