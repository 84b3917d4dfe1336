"""Keeps a window's cache blocks until it is known which drafts were right.

Under asynchronous scheduling, a request counts as far as if all drafts in flight were right. vLLM 0.16 frees the blocks
before the window of that position. If the drafts are wrong, the request is further back, and its window reaches into
them. Newer releases free by the tokens that have been read.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from model_runner_base.scheduling.releases import FREES_BY_TOKENS_READ


class WindowBlocks(Scheduler):
    """Mixin that frees blocks before a window by the tokens that have been read, listed before vLLM's scheduler."""

    keeps_window_blocks = True
    """Whether blocks stay until it is known which drafts were right; the runner looks for this attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.num_spec_tokens and not FREES_BY_TOKENS_READ:
            coordinator: Any = self.kv_cache_manager.coordinator
            coordinator.remove_skipped_blocks = partial(self._remove_skipped_blocks, coordinator.remove_skipped_blocks)

    def _remove_skipped_blocks(self, remove: Callable[[str, int], None], req_id: str, num_computed: int) -> None:
        # Placeholders are the tokens in flight, drafts among them. None are in flight under synchronous scheduling.
        remove(req_id, max(num_computed - self.requests[req_id].num_output_placeholders, 0))
