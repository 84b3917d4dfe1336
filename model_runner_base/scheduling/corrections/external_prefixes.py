"""Prefixes that a KV connector finds, and three cases in which vLLM goes wrong with them.

- A request that must not read a prefix, such as one for the log probabilities of its prompt: vLLM 0.16 asks the
  connector all the same, and the log probabilities of the loaded tokens are missing.
- Requests whose blocks are loaded hold these until they run. If the first request in the queue needs more blocks than
  they leave, and nothing runs that could give up its own, all wait for ever: in vLLM 0.16 in a small cache, in 0.33
  after a load that failed.
- A request that was preempted, and whose load fails inside of the step in which it comes back: vLLM 0.16 looks at no
  more blocks than the request had when it first ran, so it goes on with numbers that were never loaded.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from model_runner_base.scheduling.releases import (
    LOOKS_AT_RESUMED_LOADS,
    is_stopped,
    queue_without_blocks,
    waiting_requests,
)
from model_runner_base.scheduling.step_hooks import StepHooks

BETWEEN = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""States of requests that may be scheduled. One that has blocks by then has loaded them, or is a session."""


class ExternalPrefixes(StepHooks):
    """Mixin for all three, listed before vLLM's scheduler among the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scheduled_with_failures: dict[str, int] = {}
        """Tokens by request of the last step in which a load failed."""
        if self.connector is not None:
            find = self.connector.get_num_new_matched_tokens

            def find_unless_skipped(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
                found = find(request, num_computed_tokens)
                return (0, False) if request.skip_reading_prefix_cache else found

            self.connector.get_num_new_matched_tokens = find_unless_skipped  # type: ignore[method-assign]

    def _when_nothing_runs(self) -> None:
        super()._when_nothing_runs()
        # Where requests with blocks still run, as vLLM 0.33 drains them before a pause, they must not wait for ever.
        if self.connector is not None and not is_stopped(self):
            loaded = []
            for request in waiting_requests(self):
                if request.request_id in self.finished_recving_kv_req_ids:
                    loaded.append(request)
                elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                    return  # Its blocks are still under way.
                elif request.status in BETWEEN and request.num_computed_tokens and not request.resumable:
                    loaded.append(request)
            if not queue_without_blocks(self) and loaded:
                self._take_blocks(loaded[-1])

    def _before_failed_loads(self, scheduler_output: SchedulerOutput) -> None:
        self._scheduled_with_failures = scheduler_output.num_scheduled_tokens

    def _update_requests_with_invalid_blocks(
        self, requests: Iterable[Request], *args: Any, **options: Any
    ) -> tuple[set[str], int, set[int]]:
        if LOOKS_AT_RESUMED_LOADS:
            return super()._update_requests_with_invalid_blocks(requests, *args, **options)
        requests = [*requests]
        reported = [request.num_cached_tokens for request in requests]
        for request in requests:
            num_scheduled = self._scheduled_with_failures.get(request.request_id, 0)
            request.num_cached_tokens = request.num_computed_tokens - num_scheduled
        try:
            return super()._update_requests_with_invalid_blocks(requests, *args, **options)
        finally:
            for request, num_cached in zip(requests, reported, strict=True):
                request.num_cached_tokens = num_cached  # Outputs report those of the first run.

    def _take_blocks(self, request: Request) -> None:
        """Takes the blocks of a request that is loaded; it will ask the connector again."""
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        self.finished_recving_kv_req_ids.discard(request.request_id)
        self.failed_recving_kv_req_ids.discard(request.request_id)
