"""Background compilation of step sizes: a size is traced between two steps, compiled while steps run, then offered.

If graphs take long to make, a graph policy names a few sizes, so large that every step fits into one of them
(``GraphPolicy.first_sizes``). These are made before the first request. The threads of this file make the others. The
size at which a step runs changes its cost, but not its results.

    step 1 | trace A | step 2 | step 3 | step 4 | offer A | step 5, at size A
                     |------ compile A ------|
"""

import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from model_runner_base.step.graph_policy import GraphPolicy, Wait
from model_runner_base.step.guard import StepGuard
from model_runner_base.step.sizes import StepSize

logger = init_logger(f"vllm.{__name__}")

IDLE_SECONDS = 2.0
"""Time after a step from which on no request counts as served."""

SizeRuns = Iterator[tuple[object, Callable[[], None]]]
"""Runs that make the graphs of a size, each with a key. Sizes share runs of equal keys, which are made once. Each
function must be called before the next is taken from the iterator."""


class Serving(Protocol):
    """Interface of a runner whose sizes are made while it serves."""

    vllm_config: VllmConfig
    parts: Any
    pending: Any

    @property
    def graph_policy(self) -> GraphPolicy: ...


class BackgroundCompiler:
    """Compiler of sizes while steps run. It has no sizes before ``queue`` names some.

    The compiler keeps the runner alive only while it makes a size. Only one engine of a process may trace at a time, so
    an engine that starts while another one still makes sizes waits until they are made, unless the other one sleeps.
    """

    _all_started: ClassVar["weakref.WeakSet[BackgroundCompiler]"] = weakref.WeakSet()
    """Compilers of this process that have started."""

    def __init__(self, guard: StepGuard) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        self._waiting: list[StepSize] = []
        self._threads: list[threading.Thread] = []
        self._is_stopped = False
        self._is_awaited = False
        """Whether a caller waits for every size, so that none is put off while steps are served."""
        self.is_held = False
        """Whether nothing is traced for now, because the model has no weights or caches."""
        self._error: Exception | None = None
        for other in [other for other in self._all_started if other.is_making and not other.is_held]:
            gc.collect()  # Then an engine that is no longer used makes no more sizes.
            logger.info("Waiting for the step sizes of another engine in this process.")
            other._join()

    def queue(
        self,
        sizes: Sequence[StepSize],
        made: Iterable[object],
        runs_of: Callable[[Any, StepSize], SizeRuns],
        runner: Serving,
    ) -> None:
        """Notes the ``sizes`` to make after ``start``. ``made`` are the keys of runs that were made already.

        Raises ValueError if there are several workers, since they could run one step at different sizes.
        """
        if sizes and runner.vllm_config.parallel_config.world_size > 1:
            raise ValueError("several workers have to make all sizes first: first_sizes() may leave none out")
        self._waiting, self._runs_of, self._runner = list(sizes), runs_of, weakref.ref(runner)
        self._begun: dict[object, Wait] = dict.fromkeys(made, lambda: None)

    @property
    def num_left(self) -> int:
        """Number of sizes that no thread has begun to make."""
        return len(self._waiting)

    @property
    def is_making(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Begins to make the queued sizes. From now on steps must run inside the ``StepGuard``."""
        if not self._waiting:
            return
        self._started, self._num_sizes, self._num_made = time.perf_counter(), len(self._waiting), 0
        logger.info("Serving begins; %d smaller step sizes are left, and compiled from now on.", self._num_sizes)
        runner = self._runner()
        assert runner is not None
        self._num_math_threads = torch.get_num_threads()
        self._num_running = min(runner.graph_policy.num_at_a_time, self._num_sizes)
        self._all_started.add(self)
        for index in range(self._num_running):
            # The threads are no daemons, or Python would end while a compiler is at work.
            self._threads.append(threading.Thread(target=self._make_all, name=f"BackgroundCompiler-{index}"))
            self._threads[-1].start()

    def stop(self) -> None:
        """Stops before the next run: sizes that are not begun are not made any more."""
        self._is_stopped = True

    def wait(self) -> None:
        """Waits until every size is made or has failed; raises the first error."""
        self._join()
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        self._is_awaited = True
        for thread in self._threads:
            thread.join()

    def _is_over(self) -> bool:
        """Whether the engine, or the process, is about to end."""
        return self._is_stopped or self._runner() is None or not threading.main_thread().is_alive()

    def _is_halfway(self) -> bool:
        """Whether a step is between ``execute_model`` and ``sample_tokens``."""
        runner = self._runner()
        return runner is not None and runner.pending is not None

    def _is_busy(self) -> bool:
        """Whether requests are served, and no caller waits for every size."""
        return not self._is_awaited and time.monotonic() - self._guard.last_step < IDLE_SECONDS

    def _make_all(self) -> None:
        torch.set_num_threads(self._num_math_threads)  # A graph of Dynamo is compiled again for another number.
        while not self._is_over() and self._waiting:
            size = self._pick()
            if size is None:
                time.sleep(IDLE_SECONDS / 2)
                continue
            try:
                self._make(size)
            except Exception as error:
                if not self._is_over():
                    self._note(size, error)
        with self._lock:
            self._num_running -= 1
            if not self._num_running and not self._is_over():
                seconds = time.perf_counter() - self._started
                logger.info(
                    "%d of %d smaller step sizes are compiled after %.0f s.", self._num_made, self._num_sizes, seconds
                )

    def _note(self, size: StepSize, error: Exception) -> None:
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        logger.warning("Larger step sizes go on serving for %s, which failed to compile: %s", size, what)
        logger.debug("It failed here:", exc_info=error)
        traceback.clear_frames(error.__traceback__)  # Else the error would keep what was traced.
        self._error = self._error or error

    def _pick(self) -> StepSize | None:
        """Removes and returns the size to make next; None if there is none, or none for now."""
        with self._guard.between_steps(self._is_halfway):
            runner = self._runner()
            if not self._waiting or runner is None or self.is_held:
                return None
            policy = runner.graph_policy
            size = policy.most_wanted(self._waiting)
            if self._is_busy() and (policy.compiles_in_pauses or not policy.is_worth_it(size)):
                return None
            self._waiting.remove(size)
            return size

    def _make(self, size: StepSize) -> None:
        """Makes all graphs of the size, then lets steps run at it."""
        for wait in self._begin(size):
            wait()
        with self._guard.between_steps(self._is_halfway):
            if (runner := self._runner()) is not None:
                runner.graph_policy.offer(size)
                runner.parts.repeat.stop()  # So a size is chosen for the next step.
                self._num_made += 1

    def _begin(self, size: StepSize) -> list[Wait]:
        """Traces the runs of a size, each between two steps; returns functions that wait for their compilations."""
        waits: list[Wait] = []
        runner = self._runner()
        if runner is None:
            return waits
        for key, run in self._runs_of(runner, size):
            while not self._begin_run(runner.graph_policy, key, run):
                time.sleep(IDLE_SECONDS / 20)
            waits.append(self._begun[key])
        return waits

    def _begin_run(self, policy: GraphPolicy, key: object, run: Callable[[], None]) -> bool:
        """Traces a run of a size between two steps; False if it has to wait for a pause instead."""
        with self._guard.between_steps(self._is_halfway):
            if self._is_over():
                raise InterruptedError
            if self.is_held or (policy.compiles_in_pauses and self._is_busy()):
                return False
            if key not in self._begun:
                try:
                    self._begun[key] = policy.compile_in_background(run)
                except Exception as error:
                    self._begun[key] = _raising(error)
            return True


def _raising(error: Exception) -> Wait:
    def wait() -> NoReturn:
        raise error

    return wait
