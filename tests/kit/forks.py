"""The kit's command in processes that are forked from one with vLLM imported, which takes ten seconds by itself.

Nothing of the base is imported before the fork.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[2]
ONE_AT_A_TIME = threading.Lock()
"""Lock for work in which threads that run kits would disturb each other. The environment is one for all while the
server starts in it. multiprocessing reads exit statuses, those of all processes at each start, which it can read
only once."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["vllm_alone"])


WITHOUT_SEARCH = ["-p", "no:unraisableexception"]
"""Options without pytest's search at the end, through all objects, for errors that were raised as one was deleted: a
second of each run, since vLLM's modules are searched, too."""


class Run(NamedTuple):
    status: int | None
    """Exit status; None after the timeout."""
    printed: str


def run_kit(
    arguments: Sequence[str],
    path: Path = ROOT,
    finder: MetaPathFinder | None = None,
    compiles_loops: bool = True,
    timeout_s: float = 1800,
    **environment: str,
) -> Run:
    """Runs the kit on a device that ``--platform`` names, with ``path`` ahead of the tree.

    ``finder``: of modules that are not as the tree has them.
    """
    # The server imports by this alone.
    helpers = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    with ONE_AT_A_TIME, mock.patch.dict(os.environ, PYTHONPATH=helpers):
        forkserver.ensure_running()
    with tempfile.NamedTemporaryFile("r") as printed:
        process = FORKS.Process(
            target=_kit, args=(list(arguments), path, finder, compiles_loops, environment, printed.name)
        )
        status = _exit_status(process, timeout_s)
        return Run(status, printed.read())


def _exit_status(process: BaseProcess, timeout_s: float) -> int | None:
    """Runs a process to its end; None if it was killed after ``timeout_s`` seconds."""
    with ONE_AT_A_TIME:
        process.start()
    end, status = time.monotonic() + timeout_s, None
    while status is None and time.monotonic() < end:
        time.sleep(0.02)
        with ONE_AT_A_TIME:
            status = process.exitcode
    process.kill()
    return status


def _kit(
    arguments: list[str],
    path: Path,
    finder: MetaPathFinder | None,
    compiles_loops: bool,
    environment: dict[str, str],
    printed: str,
) -> None:
    """The kit's command, which ends the process."""
    out = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    import numba
    import vllm.platforms
    from vllm_alone import PLATFORM

    loaded = [name for name in sys.modules if name.startswith("model_runner_base")]
    assert not loaded, f"{loaded} came before the fork"
    os.environ |= environment
    os.chdir(path)
    sys.path[:0] = [str(path), str(ROOT)]
    if finder is not None:
        sys.meta_path.insert(0, finder)
    numba.config.DISABLE_JIT = not compiles_loops
    from model_runner_base.testing import __main__ as command
    from model_runner_base.testing.platform_choice import choose_platform

    assert Path(command.__file__).is_relative_to(ROOT)
    vllm.platforms._current_platform = None
    choose_platform(arguments[arguments.index("--platform") + 1])
    # For those modules of vLLM that asked before the fork. The command puts the platform in place for all others.
    PLATFORM.__class__ = type(vllm.platforms.current_platform)
    vllm.platforms._current_platform = None
    sys.exit(command.main(arguments))
