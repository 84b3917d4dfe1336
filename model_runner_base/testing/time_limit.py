"""Time limit of a rerun: it ends between two steps of the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any
from unittest.mock import patch

from vllm import LLM
from vllm.v1.request import RequestStatus

from model_runner_base.testing.engine import core_of


class OutOfTime(Exception):
    """Raised where a step would begin after the time is over."""


@contextmanager
def limit_steps(llm: LLM, end: float) -> Iterator[None]:
    """Raises ``OutOfTime`` before a step that would begin after a time of ``monotonic()``.

    The engine then has no requests left.
    """
    engine: Any = llm.llm_engine
    step = engine.step

    def step_in_time() -> Any:
        if monotonic() > end:
            raise OutOfTime
        return step()

    try:
        with patch.object(engine, "step", step_in_time):
            yield
    except OutOfTime:
        _end_requests(llm)
        raise


def _end_requests(llm: LLM) -> None:
    """Ends all requests without further steps, but for those in flight."""
    core, front = core_of(llm), llm.llm_engine.output_processor
    front.abort_requests(list(front.request_states), internal=True)
    core.scheduler.finish_requests(list(core.scheduler.requests), RequestStatus.FINISHED_ABORTED)
