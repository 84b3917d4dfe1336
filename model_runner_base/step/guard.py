"""What a step runs in. Around the runner's own halves of it: vLLM's Ray executor calls them past the worker."""

import os
import threading
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class StepGuard:
    """One thread at a time is within, and keeps no gradients; a rank whose error nobody would hear of ends its process.

    vLLM's executors hear of rank 0's errors alone. Another rank that went on after one would meet the others a
    collective late, and add what does not belong together. A guard may be entered again and again, not within itself.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.lock = threading.Lock()
        """Held within; whoever holds it is between two steps."""
        self._inference_mode = current_platform.inference_mode()

    def __enter__(self) -> None:
        self.lock.acquire()
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
