"""Requests that failed while a step was prepared, and are left out of steps until the scheduler ends them.

An error before any of the request's data is on the device ends only that request: its row is given back, and the
device's state is intact. An error in a graph, in the sampler or in a custom logits processor is raised instead, since
the rows of the whole batch have moved on. An error that other ranks may not have is raised, too: lack of memory, or a
missing file. So is any error where others count on the request (``make_request_errors``).

On the last stage of a pipeline a request that failed stays in steps, since the other stages run it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from typing import Any, TypeVar

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.multimodal.inputs import MultiModalFeatureSpec

from model_runner_base.step.call import NO_FIELDS, Forward
from model_runner_base.step.components import StepComponent
from model_runner_base.step.request_states import RequestInfo
from model_runner_base.step.schedule import Arrival, Schedule
from model_runner_base.vllm_compat.probes.config import asks_for_connector

logger = init_logger(f"vllm.{__name__}")

T = TypeVar("T")


class RequestErrors(StepComponent):
    """Failed requests that steps may still name. The output of the next step tells the scheduler of their errors."""

    def __init__(self, raised: tuple[type[Exception], ...] = (torch.OutOfMemoryError,)) -> None:
        self._raised = raised
        """Errors that end the engine instead of the request."""
        self._failed: dict[str, Sequence[MultiModalFeatureSpec]] = {}
        """Images and other items in each failed request's prompt, by request."""
        self._unreported: dict[str, str | None] = {}

    def __bool__(self) -> bool:
        return bool(self._failed)

    @contextmanager
    def recording(self, req_id: str, items: Sequence[MultiModalFeatureSpec]) -> Iterator[None]:
        """Records an error inside the block as that request's failure; ``items`` are the images and other items of its
        prompt."""
        try:
            yield
        except self._raised:
            logger.error("Request %s cannot be run, and the engine ends with it.", req_id)
            raise
        except Exception as error:
            logger.exception("Request %s cannot be run.", req_id)
            self.fail(req_id, items, error)

    def admit_or_fail(self, arrival: Arrival, known: RequestInfo | None, admit: Callable[[Arrival], None]) -> None:
        """Calls ``admit`` for a request that needs a row, and records an error as its failure; ``known`` are the data
        of one that resumes."""
        with self.recording(arrival.req_id, known.items if known else arrival.items):
            admit(arrival)

    def fail(self, req_id: str, items: Sequence[MultiModalFeatureSpec], error: Exception) -> None:
        """Records a request's failure, as ``recording`` does."""
        self._failed[req_id] = items
        self._unreported[req_id] = f"{type(error).__name__}: {error}"

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._failed

    def forget(self, req_ids: Collection[str]) -> None:
        """Forgets requests that the scheduler has ended."""
        for req_id in self._failed.keys() & set(req_ids):
            del self._failed[req_id]

    def without_failed(self, schedule: Schedule) -> Schedule:
        """A copy of the step without the failed requests; their items are encoded, since others may share them."""
        failed = self._failed
        is_left = [req_id not in failed for req_id in schedule.continued]
        num_tokens = self._without(schedule.num_tokens)
        items = [items[index] for req_id, items in failed.items() for index in schedule.encoder_inputs.get(req_id, ())]
        return replace(
            schedule,
            arrivals=[arrival for arrival in schedule.arrivals if arrival.req_id not in failed],
            continued=list(compress(schedule.continued, is_left)),
            new_blocks=list(compress(schedule.new_blocks, is_left)),
            num_computed=list(compress(schedule.num_computed, is_left)),
            num_tokens=num_tokens,
            total_num_tokens=sum(num_tokens.values()),
            drafts=self._without(schedule.drafts),
            encoder_inputs=self._without(schedule.encoder_inputs),
            failed_items=[*schedule.failed_items, *items],
        )

    def _without(self, by_request: Mapping[str, T]) -> dict[str, T]:
        return {req_id: value for req_id, value in by_request.items() if req_id not in self._failed}

    def end_step(self, forward: Forward | None) -> Mapping[str, Any]:
        """Returns the ``errors`` by request that the scheduler was not told of yet."""
        if not self._unreported:
            return NO_FIELDS
        unreported, self._unreported = self._unreported, {}
        return {"errors": unreported}


class LastStageErrors(RequestErrors):
    """Failed requests of a pipeline's last stage, which run on without their rules until the scheduler ends them.

    So the batches of all stages stay the same. The tokens of such a request are not read.
    """

    def __init__(self) -> None:
        super().__init__((torch.OutOfMemoryError, OSError))

    def admit_or_fail(self, arrival: Arrival, known: RequestInfo | None, admit: Callable[[Arrival], None]) -> None:
        """Calls ``admit``; if that fails, once more with greedy sampling in place of the request's rules. An error of
        the second call is raised."""
        super().admit_or_fail(arrival, known, admit)
        if arrival.req_id not in self:
            return
        self.forget([arrival.req_id])
        origin = known or arrival
        # Parameters make it a new request, whose prompt are all of its tokens.
        admit(replace(arrival, params=SamplingParams(temperature=0), adapter=origin.adapter, items=origin.items))


def make_request_errors(vllm_config: VllmConfig) -> RequestErrors:
    """Makes the failed requests of an engine.

    A pipeline's last stage alone tells the scheduler of failed requests, and the others would not leave them out: so
    errors of other stages, and of pooling, are raised. So they are with a KV connector, whose half in the scheduler
    counts the blocks of a scheduled request as written.
    """
    parallel = vllm_config.parallel_config
    if asks_for_connector(vllm_config):
        return RequestErrors((Exception,))
    if (num_stages := parallel.pipeline_parallel_size) > 1:
        is_last = parallel.rank >= parallel.tensor_parallel_size * (num_stages - 1)
        samples = vllm_config.model_config.runner_type == "generate"
        return LastStageErrors() if is_last and samples else RequestErrors((Exception,))
    # Files may be missing on one rank's host alone; the others would run the request.
    return RequestErrors((torch.OutOfMemoryError, OSError)) if parallel.world_size > 1 else RequestErrors()
