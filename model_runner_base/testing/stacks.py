"""Places in the code at which the processes of a server are, for the report of a request that gets no answer."""

import faulthandler
import os
import re
import signal
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

DIRECTORY = "MODEL_RUNNER_BASE_STACKS"
"""Variable of the environment with the directory that processes write their stacks to."""
TIMEOUT_S = 5
"""Seconds that a process may take to write its stack."""
FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
TITLE = re.compile(r"VLLM::(\S+)")
"""Title that vLLM gives an engine core, or a worker."""
STDLIB = sysconfig.get_path("stdlib")


class Frame(NamedTuple):
    file: str
    line: str
    function: str

    @property
    def waits(self) -> bool:
        """Whether the frame is of Python, torch or vLLM, in which processes wait for each other."""
        parts = Path(self.file).parts
        is_of_python = self.file.startswith((STDLIB, "<")) and "site-packages" not in parts
        return is_of_python or "torch" in parts or "vllm" in parts

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}:{self.line})"


def write_on_signal() -> None:
    """Has this process, and those that it forks, write their stacks to files named by process ids when they get
    SIGUSR1, if the environment names a directory."""
    if os.environ.get(DIRECTORY):
        _write_on_signal()
        os.register_at_fork(after_in_child=_write_on_signal)


def _write_on_signal() -> None:
    file = Path(os.environ[DIRECTORY], f"stack-{os.getpid()}").open("w")  # noqa: SIM115 faulthandler writes to it later.
    faulthandler.register(signal.SIGUSR1, file, all_threads=False)


def places_of(parent: psutil.Process, directory: Path) -> str:
    """Sentence that says where each worker of a server is; where each engine core is, if workers have no processes of
    their own."""
    named = {}
    for child in parent.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if title := TITLE.match(" ".join(child.cmdline())):
                named[child] = title[1]
    workers = {child: name for child, name in named.items() if "Worker" in name}
    places = [f"{name} is {_place_of(child, directory)}" for child, name in (workers or named).items()]
    return ", ".join(sorted(places)) or "the engine's processes are gone"


def _place_of(process: psutil.Process, directory: Path) -> str:
    """Words for the innermost function of a process that does not just wait; for the innermost one if all do."""
    file = directory / f"stack-{process.pid}"
    if not file.exists():
        return "somewhere"
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + TIMEOUT_S
    while not (frames := [Frame(*found) for found in FRAME.findall(file.read_text())]):
        if time.monotonic() > deadline:
            return "in code that no signal reaches"
        time.sleep(0.05)
    time.sleep(0.05)  # The rest of the stack.
    frames = [Frame(*found) for found in FRAME.findall(file.read_text())]
    return f"in {next((frame for frame in frames if not frame.waits), frames[0])}"
