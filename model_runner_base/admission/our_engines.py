"""Register of this library's engines in a process, their scheduler, and the engine whose front end reads a request."""

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

SCHEDULER = "model_runner_base.scheduling.make_scheduler"
"""Qualified name of the scheduler if the user names none. It is called like a class."""
WORKERS: list[Any] = []
"""``worker_cls`` of each engine of this library."""


class Checks(Protocol):
    """Interface of ``RequestChecks``: checks of the requests of one engine."""

    def check(self, processed_inputs: Any, params: "SamplingParams | PoolingParams") -> None:
        """Raises ValueError for a request whose output would be wrong."""


arriving: ContextVar[Checks | None] = ContextVar("arriving", default=None)
"""Checks of the engine whose front end reads a request now; None if the engine is not this library's."""


def is_ours(vllm_config: "VllmConfig") -> bool:
    """Whether this process was prepared for an engine of this library with this worker (``front_end.stand_before``)."""
    return vllm_config.parallel_config.worker_cls in WORKERS


def check_arriving(processed_inputs: Any, params: "SamplingParams | PoolingParams") -> None:
    """Checks an arriving request, for ``Platform.validate_request``; raises ValueError if its output would be wrong."""
    if (checks := arriving.get()) is not None:
        checks.check(processed_inputs, params)
