"""From the schedule to the batch, built from scratch."""

from typing import NamedTuple

import numpy as np

from model_runner_base.host_loops import compiled, int_array
from model_runner_base.requests.states import RequestStates
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.schedule import Schedule


class BatchOrder(NamedTuple):
    """The order of a batch's requests that its attention needs; the scheduler's among those alike."""

    decode_len: int = 1
    """A request with at most so many new tokens has a decode row, and comes before those with more."""
    fresh_last: bool = False
    """Whether the order is: decode rows; requests that go on with at most ``decode_len`` tokens; those that go on with
    more; requests that have nothing in the cache, however many tokens they have. vLLM's backends expect it
    (``reorder_batch_to_split_decodes_and_prefills`` in vllm/v1/attention/backends/utils.py)."""
    row_len: int = 1
    """Tokens that every decode row takes up, whether it has as many or not. More than one where drafts are verified:
    then requests have a decode row once all their tokens are output, and the scheduler says how far they are."""
    prompts_in_chunks: bool = False
    """Whether no token of a prompt may have a decode row: requests have one once all their tokens are output."""


class BatchBuilder:
    """Builds the batch of a step and advances the requests' progress."""

    def __init__(self, requests: RequestStates, order: BatchOrder) -> None:
        self._requests = requests
        self._order = order

    def build(self, schedule: Schedule) -> InputBatch:
        """From scratch: any step."""
        requests = self._requests
        req_ids, row_len = list(schedule.num_tokens), self._order.row_len
        if row_len > 1 and schedule.continued:
            # Whether drafts were right the device alone knows; their requests' progress is the scheduler's bound.
            requests.num_computed[requests.rows_of(schedule.continued)] = schedule.num_computed
        rows = requests.rows_of(req_ids)
        query_len = int_array(schedule.num_tokens.values())
        keys = np.empty(len(rows), np.int64)
        num_decodes, is_sorted = order_of(
            rows, query_len, requests.num_computed, requests.num_known, *self._order, keys
        )
        if not is_sorted:
            order = np.argsort(keys, kind="stable")
            req_ids = [req_ids[index] for index in order.tolist()]
            rows, query_len = rows[order], query_len[order]
        counts, is_sampled = np.empty((3, len(rows)), np.int64), np.empty(len(rows), np.bool_)
        num_sampled = advance(
            rows, query_len, requests.num_computed, requests.num_known, num_decodes, row_len, counts, is_sampled
        )
        requests.note_step(rows)
        query_start, num_computed, seq_lens = counts
        return InputBatch(
            req_ids=req_ids,
            rows=rows,
            num_tokens=schedule.total_num_tokens,
            query_len=query_len,
            query_start=query_start,
            num_computed=num_computed,
            seq_lens=seq_lens,
            is_sampled=is_sampled,
            num_sampled=num_sampled,
            num_decodes=num_decodes,
            row_len=row_len,
            drafts=schedule.drafts,
        )


@compiled
def order_of(
    rows: np.ndarray,
    query_len: np.ndarray,
    progress: np.ndarray,
    num_known: np.ndarray,
    decode_len: int,
    fresh_last: bool,
    row_len: int,
    prompts_in_chunks: bool,
    keys: np.ndarray,
) -> tuple[int, bool]:
    """Fills ``keys`` [R] that a batch is sorted by; returns how many have a decode row, and whether it is sorted."""
    num_decodes, is_sorted = 0, True
    for index in range(len(rows)):
        if row_len > 1 or prompts_in_chunks:
            key = 0 if progress[rows[index]] >= num_known[rows[index]] else 1
        else:
            key = 0 if query_len[index] <= decode_len else 1
        num_decodes += 1 - key
        if fresh_last and progress[rows[index]] == 0:
            key = 3
        elif fresh_last and key == 1 and query_len[index] > decode_len:
            key = 2
        keys[index] = key
        if index and key < keys[index - 1]:
            is_sorted = False
    return num_decodes, is_sorted


@compiled
def advance(
    rows: np.ndarray,
    query_len: np.ndarray,
    progress: np.ndarray,
    num_known: np.ndarray,
    num_decodes: int,
    row_len: int,
    counts: np.ndarray,
    is_sampled: np.ndarray,
) -> int:
    """Moves the ``progress`` of requests, by row, on by ``query_len``; ``num_known`` [rows] are the tokens on the host.
    The first ``num_decodes`` have a decode row, and take up ``row_len`` tokens of the step if that is more.

    Fills ``is_sampled`` and, as ``counts`` [3, R], ``query_start``, ``num_computed`` and ``seq_lens`` of an
    ``InputBatch``; returns its ``num_sampled``.
    """
    token = num_sampled = 0
    for request in range(len(rows)):
        row = rows[request]
        before = progress[row]
        progress[row] = after = before + query_len[request]
        counts[0, request], counts[1, request], counts[2, request] = token, before, after
        is_sampled[request] = after >= num_known[row]
        num_sampled += is_sampled[request]
        token += max(query_len[request], row_len) if request < num_decodes else query_len[request]
    return num_sampled
