"""Batch of one step: its requests, and which tokens of each run. It is built from the step's schedule; a step that
repeats the last one needs no new one (step/repeat.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from model_runner_base.step.host_loops import compiled, int_array
from model_runner_base.step.request_states import RequestStates
from model_runner_base.step.schedule import Schedule


@dataclass
class InputBatch:
    """Scheduled requests of one step: R requests, those with a decode row first.

    While a step is repeated one batch serves them all: its ``num_computed`` and ``seq_lens`` move on in place.
    """

    req_ids: list[str]
    num_tokens: int
    """Number of scheduled tokens, padding not counted."""
    rows: np.ndarray
    """[R] row of each request in the request states."""
    query_len: np.ndarray
    """[R] number of tokens scheduled."""
    query_start: np.ndarray
    """[R] index of each request's first token in the step. Once the batch is packed, the padding between decode rows
    and chunks counts too."""
    num_computed: np.ndarray
    """[R] number of tokens in the cache before this step."""
    seq_lens: np.ndarray
    """[R] number of tokens in the cache after this step."""
    is_sampled: np.ndarray
    """[R] bool: whether the request yields a token, that is, no later chunk of its prompt is left."""
    num_sampled: int
    """Number of requests that yield a token."""
    num_decodes: int
    """Number of requests with a decode row; they come first."""
    decode_query_len: int = 1
    """Number of token places in a decode row; more than one where drafts are verified."""
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Drafts to verify, by request, as in ``Schedule``."""
    is_repeat: bool = False
    """Whether this is the last step's batch, every request one token further (see ``Repeat``)."""
    plan: Any = None
    """The head's plan of the batch (``Head.plan``), which serves all of its repeats."""

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @cached_property
    def req_id_to_index(self) -> dict[str, int]:
        return dict(zip(self.req_ids, range(self.num_reqs), strict=True))

    @cached_property
    def unsampled(self) -> list[int]:
        """Indices of the requests that yield no token."""
        return [] if self.num_sampled == self.num_reqs else np.flatnonzero(~self.is_sampled).tolist()

    @property
    def is_decode(self) -> bool:
        """Whether every request has a decode row."""
        return self.num_decodes == self.num_reqs

    @property
    def num_decode_tokens(self) -> int:
        """Number of token places in decode rows, those of missing drafts included."""
        return self.num_decodes * self.decode_query_len

    @property
    def num_places(self) -> int:
        """Number of token places in the step: ``num_tokens``, and the places of missing drafts."""
        if self.decode_query_len == 1:
            return self.num_tokens
        return self.num_tokens + self.num_decode_tokens - int(self.query_len[: self.num_decodes].sum())

    # ---- Logits rows: ``decode_query_len`` for a decode row, one for a chunk ----

    def logits_start(self, requests: np.ndarray) -> np.ndarray:
        """[N] first logits row of each of N requests, which are given by their indices in the batch."""
        if self.decode_query_len == 1:
            return requests
        return requests + np.minimum(requests, self.num_decodes) * (self.decode_query_len - 1)

    def num_logits(self, requests: np.ndarray) -> np.ndarray:
        """[N] number of logits rows that are sampled for each of N requests, from its first one on."""
        return np.where(requests < self.num_decodes, self.query_len[requests], 1)

    def logits_rows(self, requests: np.ndarray) -> "LogitsRows":
        """Logits rows that are sampled for N requests."""
        if self.decode_query_len == 1:
            return LogitsRows(requests, np.arange(len(requests)), np.zeros_like(requests))
        counts = self.num_logits(requests)
        owner = np.repeat(np.arange(len(requests)), counts)
        place = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
        return LogitsRows(self.logits_start(requests)[owner] + place, owner, place)


class LogitsRows(NamedTuple):
    """S logits rows that belong to some requests of a batch.

    Example: decode rows have 4 places; the first request decodes with 2 drafts, the second has a chunk. Sampled rows of
    both: indices [0, 1, 2, 4], owner [0, 0, 0, 1], place [0, 1, 2, 0].
    """

    indices: np.ndarray
    """[S] indices among all logits rows."""
    owner: np.ndarray
    """[S] owner of each row, as an index among the requests that were asked for."""
    place: np.ndarray
    """[S] number of the request's drafts before the token that is sampled there."""


class BatchOrder(NamedTuple):
    """Order of a batch's requests that its attention needs. Requests of equal rank stay in the scheduler's order."""

    decode_len: int = 1
    """Largest number of new tokens of a request that has a decode row. Requests with a decode row come first."""
    fresh_last: bool = False
    """Whether the order is: decode rows; requests that go on with at most ``decode_len`` tokens; those that go on with
    more; requests that have nothing in the cache, however many tokens they have. vLLM's backends expect it
    (``reorder_batch_to_split_decodes_and_prefills`` in vllm/v1/attention/backends/utils.py)."""
    decode_query_len: int = 1
    """Number of token places that every decode row takes up, used or not. It is more than one where drafts are
    verified. Then a request has a decode row once all of its known tokens (``RequestStates.num_known``) are computed,
    and the scheduler says how far it is."""
    prompts_in_chunks: bool = False
    """Whether no token of a prompt may have a decode row. Then, too, a request has one once all of its known tokens are
    computed."""


class BatchBuilder:
    """Builds the batch of a step and advances the requests' progress."""

    def __init__(self, requests: RequestStates, order: BatchOrder) -> None:
        self._requests = requests
        self._order = order

    def build(self, schedule: Schedule) -> InputBatch:
        """Builds the batch from scratch; works for any step."""
        requests = self._requests
        req_ids, decode_query_len = list(schedule.num_tokens), self._order.decode_query_len
        if decode_query_len > 1 and schedule.continued:
            # Only the device knows which drafts were right, so the progress of their requests is the scheduler's bound.
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
            rows,
            query_len,
            requests.num_computed,
            requests.num_known,
            num_decodes,
            decode_query_len,
            counts,
            is_sampled,
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
            decode_query_len=decode_query_len,
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
    decode_query_len: int,
    prompts_in_chunks: bool,
    keys: np.ndarray,
) -> tuple[int, bool]:
    """Fills the sort keys ``keys`` [R] of a batch; returns the number of decode rows, and whether it is sorted
    already."""
    num_decodes, is_sorted = 0, True
    for index in range(len(rows)):
        if decode_query_len > 1 or prompts_in_chunks:
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
    decode_query_len: int,
    counts: np.ndarray,
    is_sampled: np.ndarray,
) -> int:
    """Advances the ``progress`` [rows] of requests by ``query_len``; ``num_known`` [rows] are the tokens on the host.

    The first ``num_decodes`` requests have a decode row. Each of them takes up ``decode_query_len`` tokens of the step,
    or its ``query_len`` if that is more.

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
        token += max(query_len[request], decode_query_len) if request < num_decodes else query_len[request]
    return num_sampled
