"""Check that a process that is killed takes the processes of its engine with it."""

import signal
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


def check_all_end(parent: psutil.Process, *, spared: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to a process, and asserts that what it started ends: engine core, workers, and their helpers.

    Args:
        spared: a process that is not looked at.
    """
    children = [child for child in parent.children(recursive=True) if child.pid != spared]
    assert children, "it has no engine in a process of its own"
    parent.send_signal(by)
    _, left = psutil.wait_procs([parent, *children], timeout=ALLOWED_S)
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:  # It has ended, and nothing has asked for its status.
                names.append(f"{process.pid} ({' '.join(process.cmdline())[:80]})")
                process.kill()
    assert not names, f"processes outlive the one that started them by {ALLOWED_S} s: {', '.join(names)}"
