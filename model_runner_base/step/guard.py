"""What a step runs in. Around the runner's own halves of it: vLLM's Ray executor calls them past the worker."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(f"vllm.{__name__}")

P = ParamSpec("P")
T = TypeVar("T")


class StepGuard:
    """Half of a step: one thread of the process at a time is within; a rank whose error nobody hears of ends it.

    No gradients are kept within.

    vLLM's executors hear of rank 0's errors alone. Another rank that went on after one would meet the others a
    collective late, and add what does not belong together. A guard may be entered again and again, not within itself.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._is_wanted = False
        """Whether a step waits to begin."""
        self._inference_mode = current_platform.inference_mode()

    lock = threading.Lock()
    """Held within, of all engines of the process: vLLM's forward context is one for all."""

    @contextmanager
    def between_steps(self, is_halfway: Callable[[], bool]) -> Iterator[None]:
        """As the guard itself, for what is no step: one that waits, or is halfway, goes first."""
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
        self.lock.release()
        if self._rank and isinstance(exc, Exception):
            logger.error("This worker failed in a step, so it ends; the engine ends with it.", exc_info=exc)
            os._exit(1)


def guarded(half: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A runner's half of a step, within the runner's ``step_guard``."""

    @wraps(half)
    def run(runner: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        with runner.step_guard:
            return half(runner, *args, **kwargs)

    return run
