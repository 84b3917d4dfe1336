"""Check that a process that is killed takes the processes of its engine with it."""

import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import psutil

ALLOWED_S = 5
"""Seconds after which none of them may be left."""


def children_with(argument: str, parent: psutil.Process) -> list[psutil.Process]:
    """Children of a process that have an argument in their command, without those that have ended."""
    found = []
    for child in parent.children():
        with suppress(psutil.NoSuchProcess):
            if argument in child.cmdline():
                found.append(child)
    return found


def check_all_end(parent: psutil.Process, *, spared: Collection[int] = (), by: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to a process, and asserts that what it started ends: engine core, workers, and their helpers.

    Args:
        spared: processes that are not looked at.
    """
    left = [child for child in parent.children(recursive=True) if child.pid not in spared]
    assert left, "it has no engine in a process of its own"
    parent.send_signal(by)
    deadline = time.monotonic() + ALLOWED_S
    while (left := running(left)) and time.monotonic() < deadline:
        time.sleep(0.02)
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            names.append(f"{process.pid} ({' '.join(process.cmdline())[:80]})")
            process.kill()
    assert not names, f"processes outlive the one that started them by {ALLOWED_S} s: {', '.join(names)}"


def running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Processes that have not ended. A zombie has ended, and nothing has asked for its status."""
    running = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running
