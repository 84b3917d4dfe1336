"""Batch of one step: its requests, and which tokens of each run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np


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
    row_len: int = 1
    """Number of token places in a decode row; more than one where drafts are verified."""
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Drafts to verify, by request, as in ``Schedule``."""
    is_repeat: bool = False
    """Whether this is the last step's batch, every request one token further (see ``Repeat``)."""

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
        return self.num_decodes * self.row_len

    @property
    def num_places(self) -> int:
        """Number of token places in the step: ``num_tokens``, and the places of missing drafts."""
        if self.row_len == 1:
            return self.num_tokens
        return self.num_tokens + self.num_decode_tokens - int(self.query_len[: self.num_decodes].sum())

    # ---- Rows of logits: ``row_len`` for a decode row, one for a chunk ----

    def logits_start(self, requests: np.ndarray) -> np.ndarray:
        """[N] first row of logits of each of N requests, which are given by their indices in the batch."""
        if self.row_len == 1:
            return requests
        return requests + np.minimum(requests, self.num_decodes) * (self.row_len - 1)

    def num_logits(self, requests: np.ndarray) -> np.ndarray:
        """[N] number of rows of logits that are sampled for each of N requests, from its first row on."""
        return np.where(requests < self.num_decodes, self.query_len[requests], 1)

    def logits_rows(self, requests: np.ndarray) -> "LogitsRows":
        """Rows of logits that are sampled for N requests."""
        if self.row_len == 1:
            return LogitsRows(requests, np.arange(len(requests)), np.zeros_like(requests))
        counts = self.num_logits(requests)
        owner = np.repeat(np.arange(len(requests)), counts)
        place = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
        return LogitsRows(self.logits_start(requests)[owner] + place, owner, place)


class LogitsRows(NamedTuple):
    """S rows of logits that belong to some requests of a batch.

    Example: decode rows have 4 places; the first request decodes with 2 drafts, the second has a chunk. Sampled rows of
    both: rows [0, 1, 2, 4], owner [0, 0, 0, 1], place [0, 1, 2, 0].
    """

    rows: np.ndarray
    """[S] indices among all rows of logits."""
    owner: np.ndarray
    """[S] owner of each row, as an index among the requests that were asked for."""
    place: np.ndarray
    """[S] number of the request's drafts before the token that is sampled there."""
