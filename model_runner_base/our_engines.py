"""Which engines of this process are this library's, and whose front end reads a request now."""

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

WORKERS: list[Any] = []
"""``worker_cls`` of each engine of this library."""


class Checks(Protocol):
    """What one engine serves (``RequestChecks``)."""

    def check(self, processed_inputs: Any, params: "SamplingParams | PoolingParams") -> None:
        """Raises ValueError for what would come out wrong."""


arriving: ContextVar[Checks | None] = ContextVar("arriving", default=None)
"""Of the engine whose front end reads a request now; None if it is not one of ours."""


def is_ours(vllm_config: "VllmConfig") -> bool:
    """Whether this process was prepared for such an engine (``front_end.stand_before``)."""
    return vllm_config.parallel_config.worker_cls in WORKERS


def check_arriving(processed_inputs: Any, params: "SamplingParams | PoolingParams") -> None:
    """To be called by ``Platform.validate_request``; raises ValueError for what would come out wrong."""
    if (checks := arriving.get()) is not None:
        checks.check(processed_inputs, params)
