"""Sizes that are made while steps are served: traced between two steps, compiled beside them, then offered to dispatch.

A graph policy whose graphs take long names the few sizes that hold every step (``GraphPolicy.first_sizes``). They stand
before the first request; the others are left to the threads of this room. Which size serves a step changes what it
costs, not its tokens.

    step 1 | trace A | step 2 | step 3 | step 4 | offer A | step 5, at size A
                     |------ compile A ------|
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

from vllm.logger import init_logger

from model_runner_base.graph_policy import GraphPolicy, Wait
from model_runner_base.step.guard import StepGuard
from model_runner_base.step.sizes import StepSize

logger = init_logger(__name__)

SizeParts = Iterator[tuple[object, Callable[[], None]]]
"""What makes a size, each to be run before the next is asked for, with a key: parts of equal keys are made once."""


class SizesBehind:
    """The sizes that are still to be made: none, unless ``leave`` is called."""

    def __init__(self, guard: StepGuard) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        self._waiting: list[StepSize] = []
        self._threads: list[threading.Thread] = []
        self._is_stopped = False
        self._error: Exception | None = None

    def leave(
        self,
        sizes: Sequence[StepSize],
        made: Iterable[object],
        parts_of: Callable[[StepSize], SizeParts],
        policy: GraphPolicy,
        repeat_no_more: Callable[[], None],
    ) -> None:
        """``sizes`` are to be made once ``start`` is called.

        Args:
            made: keys of parts that stand.
            repeat_no_more: has the next step dispatched anew.
        """
        self._waiting, self._parts_of, self._policy = list(sizes), parts_of, policy
        self._begun: dict[object, Wait] = dict.fromkeys(made, lambda: None)
        self._repeat_no_more = repeat_no_more

    @property
    def num_left(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        """Begins to make what was left. From now on steps are to be run within the guard."""
        if not self._waiting:
            return
        self._started, self._num_sizes = time.perf_counter(), len(self._waiting)
        self._num_unmade = self._num_sizes
        logger.info("Serving begins; %d smaller step sizes are compiled meanwhile.", self._num_sizes)
        for index in range(min(self._policy.num_at_a_time, self._num_sizes)):
            # No daemons: Python would end beneath a compiler at work.
            self._threads.append(threading.Thread(target=self._make_all, name=f"SizesBehind-{index}"))
            self._threads[-1].start()

    def stop(self) -> None:
        """What has not begun is not made any more."""
        self._is_stopped = True

    def _is_over(self) -> bool:
        return self._is_stopped or not threading.main_thread().is_alive()

    @property
    def is_making(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        """Returns when every size stands; raises what kept the first of the others from it."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _make_all(self) -> None:
        while (size := self._pick()) is not None:
            try:
                self._make(size)
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # What was traced is not kept for the error's sake.
                self._error = self._error or error
                what = str(error).strip().partition("\n")[0] or type(error).__name__
                logger.warning("Larger step sizes go on serving for %s, which failed to compile: %s", size, what)
            with self._lock:
                self._num_unmade -= 1
                if not self._num_unmade and self._error is None and not self._is_over():
                    seconds = time.perf_counter() - self._started
                    logger.info("All %d smaller step sizes stand after %.0f s.", self._num_sizes, seconds)

    def _pick(self) -> StepSize | None:
        """The size to be made next; None if there is none, or the engine is about to end."""
        with self._lock:
            if not self._waiting or self._is_over():
                return None
            size = self._policy.most_wanted(self._waiting)
            self._waiting.remove(size)
            return size

    def _make(self, size: StepSize) -> None:
        """Traces what the size is made of, one part between two steps, and offers it when all of that is compiled."""
        waits = []
        for key, run in self._parts_of(size):
            if self._is_over():
                return
            with self._guard:
                if key not in self._begun:
                    self._begun[key] = self._policy.compile_behind(run)
            waits.append(self._begun[key])
        for wait in waits:
            wait()
        with self._guard:
            self._policy.offer(size)
            self._repeat_no_more()
