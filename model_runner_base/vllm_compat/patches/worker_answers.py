"""Answers of several workers to one call: all are read, also after an error.

vLLM's executor raises the first error that it reads, and leaves the answers of further workers in their queues. The
next call would take them for its own.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from model_runner_base.vllm_compat.patches.wrap_once import wrap_once

SECONDS = 60.0
"""Time that is waited, after an error, for the workers whose answers are not read yet."""


def read_all_answers(is_ours: Callable[[Any], bool]) -> None:
    """Patches vLLM's executor of several processes. Call it in the process of the engine's core.

    Args:
        is_ours: whether an engine's ``VllmConfig`` is of this library.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    wrap_once(MultiprocExecutor, "collective_rpc", lambda call: _reading_all(call, is_ours))


class CountedQueue:
    """Queue of a worker's answers that counts those that were read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.num_read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._queue.dequeue(*args, **kwargs)
        self.num_read += 1
        return answer


def _reading_all(call: Any, is_ours: Callable[[Any], bool]) -> Any:
    @wraps(call)
    def collective_rpc(executor: Any, *args: Any, **kwargs: Any) -> Any:
        # Calls of a step do not wait, and have the answer of one worker.
        is_of_one = kwargs.get("non_block") or kwargs.get("unique_reply_rank") is not None
        if is_of_one or not is_ours(executor.vllm_config):
            return call(executor, *args, **kwargs)
        queues, counted = executor.response_mqs, [CountedQueue(queue) for queue in executor.response_mqs]
        executor.response_mqs = counted
        try:
            return call(executor, *args, **kwargs)
        except TimeoutError:
            raise  # The caller has set how long it waits.
        except Exception as error:
            # An error without an answer is one of the executor: it may have sent nothing.
            if any(queue.num_read for queue in counted):
                _read_rest(executor, counted, error)
            raise
        finally:
            if executor.response_mqs is counted:  # A shutdown empties it.
                executor.response_mqs = queues

    return collective_rpc


def _read_rest(executor: Any, queues: list[CountedQueue], error: Exception) -> None:
    """Reads the answer of each worker that has none read; raises RuntimeError if one does not answer."""
    deadline = time.monotonic() + SECONDS
    for rank, queue in enumerate(queues):
        while not queue.num_read and not executor.is_failed:
            try:
                queue.dequeue(timeout=0.1)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{error}; worker {rank} has not answered for {SECONDS:.0f} s: restart the engine"
                    ) from error
