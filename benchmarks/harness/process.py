"""A process that is told jobs, with time limits: each job is a JSON line, and so is each answer.

The process answers ``{"result": ...}`` or ``{"error": ...}``, and answers once before the first job, when it is ready.
"""

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]


class SideError(RuntimeError):
    """Error that a side reports of a job that failed."""


class SideEnded(SideError):
    """End of a side's process, after a time limit or by itself. The message is the end of its log."""


def environment() -> dict[str, str]:
    """Environment of this process, with the repository on the path."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Side:
    """One side of a comparison, in a process of its own.

    Raises:
        SideError: a job failed.
        SideEnded: a job took longer than its limit, or the process ended.
    """

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )

    def ask(self, job: str, limit_s: float | None, **arguments: Any) -> Any:
        """Answer to a job; with None as the limit it may take any time."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"job": job, **arguments}), file=self._process.stdin)
        except OSError:
            raise self._ended() from None
        return self.answer(limit_s)

    def answer(self, limit_s: float | None) -> Any:
        """Answer to the oldest open job; the first job is that of starting."""
        assert self._process.stdout is not None
        # A line comes whole: the side writes it at once.
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            # A pipe to a process that has ended breaks as it is closed.
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
