"""Processes of benchmarks.gpu: a side that is told jobs, with time limits, and a description of the host."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROBE = """
import importlib.metadata as m, json, platform, torch
from importlib.util import find_spec
has = torch.cuda.is_available()
names = ("vllm", "torch", "triton", "transformers", "numpy")
have = {d.metadata["Name"].lower(): d.version for d in reversed(list(m.distributions())) if d.metadata["Name"]}
print(json.dumps({
    "device": torch.cuda.get_device_name() if has else None,
    "device_bytes": torch.cuda.mem_get_info()[1] if has else 0,
    "cuda": torch.version.cuda,
    "python": platform.python_version(),
    **{name: have.get(name) for name in names},
    "kernels": find_spec("vllm._C") is not None,
    "can_sleep": find_spec("vllm.cumem_allocator") is not None,
}))
"""


class SideError(RuntimeError):
    """Error that a side reports of a job that failed."""


class SideEnded(SideError):
    """End of a side's process, after a time limit or by itself. The message is the end of its log."""


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def probe_host() -> dict[str, Any]:
    """Description of the host, from a process of its own: one that asks CUDA holds device memory until it ends."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    if done.returncode:
        raise SideError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


class Side:
    """An engine in a process of its own; see gpu_side.py.

    Raises:
        SideError: a job failed.
        SideEnded: a job took longer than its limit, or the process ended.
    """

    def __init__(self, name: str, worker: str, platform: str | None, options: dict[str, Any]) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        spec = json.dumps({"worker": worker, "platform": platform, "options": options})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_side", spec],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )

    def ask(self, job: str, limit_s: float, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"job": job, **arguments}), file=self._process.stdin)
        except OSError:
            raise self._ended() from None
        return self.answer(limit_s)

    def answer(self, limit_s: float) -> Any:
        """Answer to the oldest open job; the first job is that of starting."""
        assert self._process.stdout is not None
        until = time.monotonic() + limit_s
        # A line comes whole: the side writes it at once.
        if not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            self._process.kill()
            self._process.wait()
            raise SideEnded(self._message(f"{self._end_of_log()}\nno answer within {limit_s:.0f} s"))
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(self._message(answer["error"]))
        return answer["result"]

    def _ended(self) -> SideEnded:
        status = self._process.wait(10)
        return SideEnded(self._message(f"{self._end_of_log()}\nthe process ended with status {status}"))

    def _message(self, text: str) -> str:
        """Text that ends with the side's name, so that a table shows the name."""
        return f"{text.rstrip()} [{self._name}]"

    def _end_of_log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            # A pipe to a process that has ended breaks as it is closed.
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
