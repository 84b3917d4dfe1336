"""Rows of a step, and those of them for which the KV cache has work."""

from typing import Protocol

import numpy as np


class BatchSource(Protocol):
    """Attributes of the rows that a batch reads."""

    req_ids: list[str]
    num_cached: np.ndarray
    client: np.ndarray
    structured: np.ndarray
    logprobs: np.ndarray


class Batch:
    """Rows that a step schedules, with their values as lists; steps with the same rows share one batch.

    ``rows`` are indices, -1 where a request has left its row since. None means the first ``len(req_ids)`` rows.
    """

    def __init__(self, rows: BatchSource, active: np.ndarray | None) -> None:
        self.rows = active
        at: slice | np.ndarray = slice(None) if active is None else active
        self.req_ids = rows.req_ids.copy() if active is None else [rows.req_ids[row] for row in active.tolist()]
        self.counts = dict.fromkeys(self.req_ids, 1)
        self.id_set: set[str] = set()
        """Ids of the batch, set once a step has scheduled these requests alone; vLLM may clear it."""
        self.num_cached: list[int] = rows.num_cached[at].tolist()
        self.clients: list[int] = rows.client[at].tolist()
        self.client = self.clients[0] if len(set(self.clients)) == 1 else None
        """Client of all requests; None if they have several clients."""
        self.structured: list[int] = np.flatnonzero(rows.structured[at]).tolist()
        self.logprobs: list[int] = np.flatnonzero(rows.logprobs[at]).tolist()
        """``structured`` and ``logprobs`` hold places in the batch, not rows."""


class RowEvents:
    """Rows with an event in a step; of these, the rows that enter a block, and those whose block is to be cached."""

    def __init__(self, rows: np.ndarray, entering: np.ndarray, caching: np.ndarray) -> None:
        self.rows, self.entering, self.caching = rows, entering, caching
