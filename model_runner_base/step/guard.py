"""Guard around each half of a step. It wraps methods of the runner, since vLLM's Ray executor bypasses the worker."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.forward_context import override_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(f"vllm.{__name__}")

P = ParamSpec("P")
T = TypeVar("T")


class StepGuard:
    """Context of one half of a step: one thread of the process at a time is inside, and no gradients are kept.

    Ranks other than 0 exit on an error, since vLLM's executors hear of one rank's errors only: the first rank of the
    last stage, from which ranks count here. A rank that went on after an error would run one collective fewer than the
    others, and add up tensors of different operations.

    A guard can be entered again after it was left, but not while it is held.
    """

    explain: Callable[[Exception], Exception]
    """Function that is told of an error in a step, and returns the one to raise in its place; it may be the same."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.explain = lambda error: error
        self._is_wanted = False
        """Whether a step is waiting to begin."""
        self._inference_mode = current_platform.inference_mode()
        self.last_step = -math.inf
        """Time, by ``time.monotonic``, at which a half of a step last ended."""

    lock = threading.Lock()
    """Lock of all engines of the process, held inside the guard: they share vLLM's forward context."""

    @contextmanager
    def between_steps(self, is_halfway: Callable[[], bool]) -> Iterator[None]:
        """Enters the guard for work that is no step. A step that is waiting or is halfway done goes first."""
        while True:
            with self.lock:
                if not self._is_wanted and not is_halfway():
                    with self._inference_mode:
                        yield
                    return
            time.sleep(0.001)

    def __enter__(self) -> None:
        self._is_wanted = True
        self.lock.acquire()
        self._is_wanted = False
        self._inference_mode.__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inference_mode.__exit__(exc_type, exc, traceback)
        self.last_step = time.monotonic()
        self.lock.release()
        if isinstance(exc, Exception):
            error = self.explain(exc)
            if self._rank:
                logger.error("This worker failed in a step, so it ends; the engine ends with it.", exc_info=exc)
                os._exit(1)
            if error is not exc:
                raise error from exc


def guarded(half: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Wraps a runner's half of a step so that it runs inside the runner's ``step_guard``."""

    @wraps(half)
    def run(runner: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        with runner.step_guard:
            return half(runner, *args, **kwargs)

    return run


def in_forward_context(half: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Wraps the half of a step that runs the model: layers find their attention metadata in vLLM's forward context."""

    @wraps(half)
    def run(runner: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        with override_forward_context(runner.parts.forward_context):
            return half(runner, *args, **kwargs)

    return run
