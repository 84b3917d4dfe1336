"""A server in a process of its own: started, waited for, measured and ended."""

import contextlib
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NamedTuple

import psutil

from benchmarks.harness.process import ROOT

STOP_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Served(NamedTuple):
    """A server that answers, and the file that it logs to."""

    process: psutil.Process
    log: IO[str]


@contextlib.contextmanager
def served(command: Sequence[str], port: int, environment: Mapping[str, str], start_s: float) -> Iterator[Served]:
    """A server, once it answers on ``port``; it ends with the context."""
    with tempfile.TemporaryFile("w+") as log:
        process = psutil.Popen(list(command), env=dict(environment), cwd=ROOT, stdout=log, stderr=log)
        try:
            _wait(port, process, log, start_s)
            yield Served(process, log)
        finally:
            _stop(process)


def processes_of(process: psutil.Process) -> Iterator[psutil.Process]:
    """A process and all that descend from it, as far as they still run."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [process, *process.children(recursive=True)]:
            if each.is_running():
                yield each


def _stop(process: psutil.Process) -> None:
    """Ends the server and all processes of it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = process.children(recursive=True)
        process.terminate()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(STOP_S)
        for each in [process, *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _wait(port: int, process: psutil.Process, log: IO[str], start_s: float) -> None:
    """Waits until the server answers. Raises RuntimeError with the end of its log if it ends or takes too long."""
    deadline = time.monotonic() + start_s
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise RuntimeError(f"the server did not start\n{log.read()[-20_000:]}")
        time.sleep(0.5)
