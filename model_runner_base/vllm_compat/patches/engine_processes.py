"""Processes that vLLM starts for an engine: they end when the process that started them is gone, also if it was killed.

vLLM ends them from that process. SIGKILL leaves it no time to do so, nor does SIGTERM in a script. So Linux signals to
them: the kernel's signal needs no code of the process that it ends, which may be in C++ and hold the GIL. Systems
without it do as vLLM does.
"""

import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import wraps
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakKeyDictionary

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

IsOurs = Callable[[Any], bool]
"""Function of an engine's ``VllmConfig``: whether the engine is of this library."""
_PIPES: WeakKeyDictionary[BaseProcess, tuple[Connection, Connection]] = WeakKeyDictionary()
"""Pipe for each process that ends with this one, which has both of its ends alone."""
_NAMES = ("EngineCore", "VllmWorker")
"""Beginnings of the names that vLLM gives to processes of engines. They tell these from a process of a user's who has
an engine in it."""


def end_servers_and_engines_with_this_process(is_ours: IsOurs) -> None:
    """Has processes of engine cores, and API servers next to them, end when this process is gone."""
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.utils import APIServerProcessManager

    wrap_once(CoreEngineProcManager, "__init__", lambda init: _ending(init, is_ours))
    # Servers that outlive it would keep the port, and answer nothing.
    wrap_once(APIServerProcessManager, "__init__", lambda init: _ending(init, lambda _: True))


def end_workers_with_this_process(is_ours: IsOurs) -> None:
    """Has the workers of an engine with several end when this process is gone; call it in a process of its core."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    wrap_once(WorkerProc, "make_worker_process", lambda make: staticmethod(_ending_worker(make, is_ours)))


def is_process_of_core() -> bool:
    """Whether vLLM started this process for an engine core."""
    return multiprocessing.current_process().name.startswith("EngineCore")


def _ending(init: Any, is_ours: IsOurs) -> Any:
    @wraps(init)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if is_ours(kwargs.get("vllm_config")):
            for process in self.processes:
                end_with_this_process(process)

    return start


def _ending_worker(make: Any, is_ours: IsOurs) -> Any:
    @wraps(make)
    def start(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        handle = make(vllm_config, *args, **kwargs)
        if is_ours(vllm_config):
            end_with_this_process(handle.proc)
        return handle

    return start


def end_with_this_process(process: BaseProcess) -> None:
    """Has a process that this one started killed when this one is gone.

    ``prctl(PR_SET_PDEATHSIG)`` would kill it too early: when the thread ends that started it.
    """
    if process.pid is None or process.exitcode is not None:
        return
    _PIPES[process] = ends = multiprocessing.Pipe(duplex=False)
    for end in ends:  # At its end the process closes one of them first, and that signals to the other.
        _kill_when_closed(end.fileno(), process.pid)


def end_with_parent() -> None:
    """Has this process killed when its parent is gone, if vLLM started it for an engine.

    The parent sees to that itself. This is for a parent that did not get so far, or that does not know this library.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_NAMES):
        return
    _kill_when_closed(parent.sentinel, os.getpid())
    if not parent.is_alive():  # It ended before.
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_when_closed(pipe: int, pid: int) -> None:
    """Has a process killed when the other end of a pipe, to which nothing is written, is closed everywhere."""
    if not hasattr(fcntl, "F_SETSIG"):
        return
    try:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, pid)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        pass  # The process has ended, or a sandbox lacks this.


def _close_pipes() -> None:
    for ends in _PIPES.values():
        for end in ends:
            end.close()


# A forked process may live longer than this one, so it must not hold them open.
os.register_at_fork(after_in_child=_close_pipes)
