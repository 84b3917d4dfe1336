"""vLLM's OpenAI server in processes of its own, with the device under test."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from types import MappingProxyType
from typing import Any, NamedTuple

from model_runner_base.testing.stacks import DIRECTORY

START_TIMEOUT = 600
"""Seconds that a server may take until it answers."""
PREFIX = re.compile(r"^(\(.*?pid=\d+\) )?([A-Z]+ [\d-]+ [\d:]+ \[.*?\] )?")
"""Process, level, time and place of a line that vLLM logs."""
REFUSAL = re.compile(r"UnsupportedConfigError|NotImplementedError: .|ValueError: .*not supported", re.IGNORECASE)
"""Last line of a traceback of an error that ``table.refusal`` takes for a refusal."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Connections to this machine, which no proxy of the environment serves."""
LAST_OF_TRACEBACK = re.compile(r"([\w.]*\.)?\w*(Error|Exception)\b")
PORTS = range(20_000, 32_000)
"""Ports of servers. Linux gives connections those from 32,768 on, and might give one away before the server has it."""
ONLY_SET = {"disable_log_stats"}
"""Options that a server does not have by default, whose flags have no opposite."""


def flags(options: Mapping[str, Any]) -> list[str]:
    """Arguments of ``vllm serve`` for options of ``vllm.LLM``: ``{"enforce_eager": True}`` is ``--enforce-eager``."""
    out = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if name in ONLY_SET and not value:
            continue
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            out += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return out


class Running(NamedTuple):
    """A server that runs."""

    pid: int
    log: Path
    """File that it prints to."""


RUNNING: dict[str, Running] = {}
"""Servers by their base URLs."""


@contextmanager
def served(model: Path, platform: str | None, log: Path, *arguments: str) -> Iterator[str]:
    """Starts the server, yields its base URL when it answers, and ends it; what it prints goes to ``log``."""
    command = [sys.executable, "-m", "model_runner_base.testing.server_process", "serve", str(model), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), DIRECTORY: str(log.parent)}
    if platform is not None:
        environment["MODEL_RUNNER_BASE_PLATFORM"] = platform
    with started(command, environment, log) as url:
        yield url


@contextmanager
def started(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[str]:
    """Runs a server's command on a free port of this machine, as ``served`` does."""
    port = _free_port()
    with log.open("w") as out:
        place = ["--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(
            [*command, *place], env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    RUNNING[url] = Running(process.pid, log)
    try:
        _wait_for(process, url, log)
        yield url
    finally:
        del RUNNING[url]
        ends = _end(process)
    assert ends, "the server did not end when it was asked to"


def _free_port() -> int:
    for port in SystemRandom().sample(PORTS, 100):  # Tests may seed the other generators alike.
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")


def _end(process: subprocess.Popen[bytes], timeout_s: float = 60) -> bool:
    """Ends a server, and the processes that it has started; returns whether it ended by itself when it was asked to."""
    process.terminate()
    try:
        process.wait(timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Returns when the server answers.

    Raises:
        AssertionError: it ends before, or does not answer.
        NotImplementedError: it ends before, since the device refuses something.
    """
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        if process.poll() is not None:
            reason = _reason(log)
            if REFUSAL.search(reason):
                raise NotImplementedError(reason)
            raise AssertionError(f"the server ended before it was ready: {reason}")
        assert time.monotonic() < deadline, f"the server was not ready in {START_TIMEOUT} s: {_reason(log)}"
        try:
            with DIRECT.open(f"{url}/health", timeout=10):
                return
        except OSError:  # No answer yet, or one that says so.
            time.sleep(0.2)


def _reason(log: Path) -> str:
    """The log's first line that ends a traceback, or else its last line."""
    lines = [PREFIX.sub("", line).strip() for line in log.read_text(errors="replace").splitlines()]
    return next(filter(LAST_OF_TRACEBACK.match, lines), lines[-1] if lines else "it printed nothing")


def first_error(url: str) -> str:
    """The first error in the log of a server that runs or has failed; the log's last line if there is none."""
    return _reason(RUNNING[url].log)


def gauge(url: str, name: str, engine: int | None = None) -> float:
    """The sum of one of the server's figures, such as ``vllm:kv_cache_usage_perc``, or one of an engine's."""
    with DIRECT.open(f"{url}/metrics", timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(f"{name}{{")]
    label = "" if engine is None else f'engine="{engine}"'
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if label in line]
    assert values, f"the server has no figure {name} {label}"
    return sum(values)


def wait_until_idle(url: str, timeout_s: float = 30) -> None:
    """Returns when no request runs or waits, and no block of the cache is in use."""
    deadline = time.monotonic() + timeout_s
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(gauge(url, name) > 0 for name in names):
        assert time.monotonic() < deadline, f"not idle: { {name: gauge(url, name) for name in names} }"
        time.sleep(0.1)


@contextmanager
def posted(
    url: str, body: dict[str, Any], timeout_s: float = 120, headers: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Any]:
    """The answer to a request, which may be read line by line; raises urllib's HTTPError for another status than 200.

    The connection is closed at the end, whether the answer was read or not.
    """
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with DIRECT.open(request, timeout=timeout_s) as answer:
        yield answer


def post(url: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A whole answer; ``options`` are those of ``posted``."""
    with posted(url, body, **options) as answer:
        return json.load(answer)


def pieces_of(url: str, body: dict[str, Any]) -> list[str]:
    """Pieces of text of a streamed answer."""
    pieces = []
    with posted(url, {**body, "stream": True}) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                pieces += [
                    choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    for choice in json.loads(data)["choices"]
                ]
    return pieces
