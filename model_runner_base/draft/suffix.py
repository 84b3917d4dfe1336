"""Suffix decoding (arXiv:2411.04975): drafts what most likely follows the longest suffix that was seen before.

The suffix was seen in the request itself, or in the output of an earlier one. Trees of suffixes, from the package
``arctic-inference``, count the tokens that followed. A request has as many drafts as are likely, and may have none.
"""

from typing import Any

import numpy as np

from model_runner_base.draft.host import HostDrafter
from model_runner_base.heads.outputs import DraftTokenIds
from model_runner_base.step.request_states import RequestStates
from model_runner_base.vllm_compat.types.speculation import SuffixOptions


class SuffixDrafter(HostDrafter):
    """Drafts from trees of suffixes. A request that resumes is started again, with all its tokens as its prompt."""

    def __init__(self, requests: RequestStates, options: SuffixOptions, num_drafts: int) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # vLLM's config checks that it is installed.

        super().__init__(requests)
        self._options = options
        self._num_drafts = num_drafts
        self._cache: Any = SuffixDecodingCache(options.max_tree_depth, options.max_cached_requests)

    def take(self, requests: dict[str, int]) -> DraftTokenIds | None:
        for req_id in self._cache.active_requests - requests.keys():
            self._cache.stop_request(req_id)
        return super().take(requests)

    def look_up(
        self, req_ids: list[str], rows: np.ndarray, num_tokens: np.ndarray, num_new: np.ndarray
    ) -> list[list[int]]:
        requests = zip(req_ids, rows.tolist(), num_tokens.tolist(), num_new.tolist(), strict=True)
        return [self._look_up(*request) for request in requests]

    def _look_up(self, req_id: str, row: int, num_tokens: int, num_new: int) -> list[int]:
        cache, options, tokens = self._cache, self._options, self._requests.token_ids[row, :num_tokens]
        if req_id not in cache.active_requests:
            if req_id in cache.cached_requests:
                cache.evict_cached_response(req_id)
            cache.start_request(req_id, tokens[:-num_new])
        cache.add_active_response(req_id, tokens[-num_new:])
        num_left = self._requests.token_ids.shape[1] - num_tokens - 1
        if num_left <= 0:
            return []
        return cache.speculate(
            req_id,
            tokens[-options.max_tree_depth :],
            max_spec_tokens=min(self._num_drafts, num_left),
            max_spec_factor=options.max_spec_factor,
            min_token_prob=options.min_token_prob,
        ).token_ids
