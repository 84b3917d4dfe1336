"""What a step runs in. Around the runner's own halves of it: vLLM's Ray executor calls them past the worker."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def step_guard(rank: int) -> Iterator[None]:
    """No gradients are kept within; and a rank whose error nobody would hear of ends its process.

    vLLM's executors hear of rank 0's errors alone. Another rank that went on after one would meet the others a
    collective late, and add what does not belong together.
    """
    with current_platform.inference_mode():
        try:
            yield
        except Exception:
            if rank == 0:
                raise
            logger.exception("This worker failed in a step, so it ends; the engine ends with it.")
            os._exit(1)


def guarded(half: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A runner's half of a step, within ``step_guard``."""

    @wraps(half)
    def run(runner: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        with step_guard(runner.vllm_config.parallel_config.rank):
            return half(runner, *args, **kwargs)

    return run
