"""Drafters on the host: prompt lookup and suffix decoding.

They read all of a request's tokens, so each step is read before the next is scheduled.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from model_runner_base.draft.drafter import Drafter
from model_runner_base.heads.outputs import DraftTokenIds, ModelRunnerOutput
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.components import SectionUpdater
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_states import RequestInfo, RequestStates
from model_runner_base.step.sizes import StepSize
from model_runner_base.vllm_compat.types.speculation import SuffixOptions


class HostDrafter(Drafter):
    """Base of drafters on the host: keeps each request's tokens up to date; ``look_up`` of a subclass drafts."""

    reads = ("token_ids",)

    def __init__(self, requests: RequestStates) -> None:
        self._requests = requests
        self._num_tokens = np.zeros(requests.max_num_reqs, np.int64)
        """[rows] tokens of each request, output included."""
        self._drafts: dict[str, list[int]] = {}

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self._num_tokens[row] = len(token_ids)

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Writes the drafts after each row's last token.

        They replace numbers that refer to drafts in ``DeviceRows``, where host drafters put none.
        """
        token_ids = views["token_ids"]
        for req_id, drafts in batch.drafts.items():
            first = int(batch.query_start[batch.req_id_to_index[req_id]]) + 1
            token_ids[first : first + len(drafts)] = drafts

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater] | None:
        """Returns None, since each step has other drafts in its buffer and cannot be repeated."""
        return None

    def read_output(self, batch: InputBatch, output: ModelRunnerOutput) -> None:
        self._drafts = {}
        requests, drafted = self._requests, list[tuple[str, int, int]]()
        for req_id, row, tokens in zip(batch.req_ids, batch.rows.tolist(), output.sampled_token_ids, strict=True):
            start = self._num_tokens[row]
            # Tokens beyond the longest length are dropped: the request is finished.
            tokens = tokens[: max(0, requests.token_ids.shape[1] - start)]
            requests.token_ids[row, start : start + len(tokens)] = tokens
            self._num_tokens[row] += len(tokens)
            if tokens:
                drafted.append((req_id, row, len(tokens)))
        if drafted:
            req_ids, *numbers = map(list, zip(*drafted, strict=True))
            rows, num_new = map(np.array, numbers)
            drafts = self.look_up(req_ids, rows, self._num_tokens[rows], num_new)
            self._drafts = dict(zip(req_ids, drafts, strict=True))

    def take(self, requests: dict[str, int]) -> DraftTokenIds | None:
        return DraftTokenIds(list(self._drafts), list(self._drafts.values()))

    def look_up(
        self, req_ids: list[str], rows: np.ndarray, num_tokens: np.ndarray, num_new: np.ndarray
    ) -> list[list[int]]:
        """Returns drafts for the requests in ``rows`` [R]; some may have none.

        Each request has ``num_tokens`` [R] tokens, of which the last ``num_new`` [R] have just been sampled.
        """
        raise NotImplementedError


class NgramDrafter(HostDrafter):
    """Prompt lookup: drafts the tokens that followed an earlier occurrence of the request's last few tokens.

    As in vLLM (``v1/spec_decode/ngram_proposer.py``), the longest match of ``prompt_lookup_min`` to
    ``prompt_lookup_max`` tokens is used, and the earliest of several equally long ones. The tokens after it are the
    drafts.

    Example, with matches of 2 tokens and 3 drafts: after "5 6 7 8 1 5 6" the drafts are "7 8 1".
    """

    def __init__(self, requests: RequestStates, shortest: int, longest: int, num_drafts: int) -> None:
        super().__init__(requests)
        self._lengths = shortest, longest
        self._num_drafts = num_drafts
        zero = np.zeros(1, np.int64)
        self.look_up([], zero, zero, zero)  # Compiles ``find_matches`` at start-up.

    def look_up(
        self, req_ids: list[str], rows: np.ndarray, num_tokens: np.ndarray, num_new: np.ndarray
    ) -> list[list[int]]:
        starts = np.empty(len(rows), np.int64)
        known = self._requests.token_ids
        find_matches(*self._lengths, known, rows, num_tokens, starts)
        ends = np.minimum(starts + self._num_drafts, num_tokens)
        places = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        return [known[row, start:end].tolist() if start else [] for row, start, end in places]


@compiled
def find_matches(
    shortest: int, longest: int, known: np.ndarray, rows: np.ndarray, num_tokens: np.ndarray, starts: np.ndarray
) -> None:
    """Writes to ``starts`` [R] where the tokens after each match begin; 0 if there is no match.

    ``known`` [rows, positions] are the tokens of all rows.
    """
    for index in range(len(rows)):
        tokens, count = known[rows[index]], num_tokens[index]
        best = shortest - 1
        starts[index] = 0
        for end in range(shortest, count):
            length = 0
            while length < longest and length < end and tokens[end - 1 - length] == tokens[count - 1 - length]:
                length += 1
            if length > best:
                best = length
                starts[index] = end
                if best == longest:
                    break


class SuffixDrafter(HostDrafter):
    """Suffix decoding (arXiv:2411.04975): drafts what most likely follows the longest suffix that was seen before.

    The suffix was seen in the request itself, or in the output of an earlier one. Trees of suffixes, from the package
    ``arctic-inference``, count the tokens that followed. A request has as many drafts as are likely, and may have none.
    A request that resumes is started again, with all its tokens as its prompt.
    """

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
