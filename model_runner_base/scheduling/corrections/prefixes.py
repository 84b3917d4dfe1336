"""Prefixes that vLLM finds or keeps wrongly: of layers in chunks, of a KV connector, and of recurrent layers."""

from collections.abc import Iterable
from functools import wraps
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager
from vllm.v1.request import Request, RequestStatus

from model_runner_base.scheduling.releases import (
    LOOKS_AT_RESUMED_LOADS,
    is_stopped,
    queue_without_blocks,
    waiting_requests,
)
from model_runner_base.scheduling.state_group import StatePool
from model_runner_base.scheduling.step_hooks import StepHooks


class ChunkPrefixes(Scheduler):
    """Mixin for layers whose attention is in chunks, such as those of Llama 4; listed before vLLM's scheduler.

    A prefix can serve such a layer if it has all blocks from the beginning of the chunk of the next token. vLLM looks
    for these blocks at the longest length that other layers have. If one is missing, it takes the shorter length, which
    is in an earlier chunk where a chunk's beginning lies within a block; and it has not looked for the blocks of that
    chunk. With this mixin it does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        look_in_earlier_chunks()
        super().__init__(*args, **kwargs)


def look_in_earlier_chunks() -> None:
    """Corrects vLLM's search for the prefixes of all schedulers in this process, once."""
    manager: Any = ChunkedLocalAttentionManager
    if not hasattr(manager.find_longest_cache_hit, "__wrapped__"):
        manager.find_longest_cache_hit = _in_earlier_chunks(manager.find_longest_cache_hit)


def _in_earlier_chunks(find: Any) -> classmethod:
    @wraps(find)
    def find_longest_cache_hit(cls: type, *, max_length: int, kv_cache_spec: Any, **kwargs: Any) -> Any:
        chunk, length = kv_cache_spec.attention_chunk_size, max_length
        while True:
            sought = length
            found = find.__func__(cls, max_length=sought, kv_cache_spec=kv_cache_spec, **kwargs)
            blocks = found if isinstance(found[0], list) else found[0]  # Newer releases return the length, too.
            length = len(blocks[0]) * kv_cache_spec.block_size
            if length // chunk == sought // chunk:
                return found

    return classmethod(find_longest_cache_hit)


BETWEEN = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""States of requests that may be scheduled. One that has blocks by then has loaded them, or is a session."""


class ExternalPrefixes(StepHooks):
    """Mixin for prefixes that a KV connector finds, listed before vLLM's scheduler among the bases.

    vLLM goes wrong with them in three cases:

    - A request that must not read a prefix, such as one for the log probabilities of its prompt: vLLM 0.16 asks the
      connector all the same, and the log probabilities of the loaded tokens are missing.
    - Requests whose blocks are loaded hold these until they run. If the first request in the queue needs more blocks
      than they leave, and nothing runs that could give up its own, all wait for ever: in vLLM 0.16 in a small cache, in
      0.33 after a load that failed.
    - A request that was preempted, and whose load fails inside of the step in which it comes back: vLLM 0.16 looks at
      no more blocks than the request had when it first ran, so it goes on with numbers that were never loaded.
    """

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


class StatePrefixes(Scheduler):
    """Scheduler that keeps prefixes of recurrent layers, inherited from before vLLM's.

    Steps end where a state is kept, and read states of earlier steps. vLLM 0.16 rounds the number of a chunk's tokens,
    not the position at which it ends, and leaves out requests with outputs. A resumed request may so leave a block
    half-way, and the state in it is cached as that of the whole block. It also lets a request hit a state that another
    request writes in the same step. Newer releases do neither.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pools = (manager.block_pool for manager in self.kv_cache_manager.coordinator.single_type_managers)
        self._state_pools = [pool for pool in pools if isinstance(pool, StatePool)]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for pool in self._state_pools:
            pool.unwritten.clear()
        return super().schedule(*args, **kwargs)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        start = request.num_computed_tokens + num_new_local_computed_tokens
        if start >= request.num_tokens - 1:
            return num_new_tokens  # It decodes.
        size, most = self.cache_config.block_size, self.scheduler_config.max_num_seqs * (1 + self.num_spec_tokens)
        # Requests that decode may leave fewer tokens of a step than a block has, for as long as they run.
        may_wait = size <= self.max_num_scheduled_tokens - most
        # A drafter that reads hidden states needs those of the last block of a hit, which is computed anew.
        # States of prompts alone are kept, also by a resumed request, which has more tokens.
        hit = request.num_prompt_tokens - size if self.use_eagle else request.num_prompt_tokens
        return chunk_end(start, start + num_new_tokens, request.num_tokens, hit, size, may_wait) - start


def chunk_end(start: int, end: int, known: int, hit: int, block_size: int, may_wait: bool) -> int:
    """End of a chunk that begins at ``start`` and may go on to ``end``, of a request with ``known`` tokens.

    A later request with the same tokens is hit at the last block's end before the ``hit``-th of them.

    A chunk that begins inside a block ends with it at the latest, so that a full block has the state at its end. Others
    end with a block, too, except for the last one, before which the last state that may be hit is kept. Where no block
    ends before ``end``, the chunk is empty if it ``may_wait`` for a step with more space, else it ends inside a block.
    """
    last = max((hit - 1) // block_size * block_size, 0)
    if start < last < end:
        end = last
    elif end < known:
        whole = end // block_size * block_size
        end = whole if whole > start else start if may_wait else end
    return min(end, (start // block_size + 1) * block_size) if start % block_size else end
