"""Kept prefixes of models with recurrent layers: steps end where a state is kept, and read states of earlier steps.

vLLM 0.16 rounds the number of a chunk's tokens, not the position at which it ends, and leaves out requests with
outputs. A resumed request may so leave a block half-way, and the state in it is cached as that of the whole block. It
also lets a request hit a state that another request writes in the same step. Newer releases do neither.
"""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from model_runner_base.scheduling.state_group import StatePool


class StatePrefixes(Scheduler):
    """Scheduler that keeps prefixes of recurrent layers, inherited from before vLLM's."""

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
