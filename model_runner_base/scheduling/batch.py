"""Which rows a step schedules, and what it has to do to the cache for them."""

from typing import Protocol

import numpy as np


class Listed(Protocol):
    """What a batch reads of the rows."""

    req_ids: list[str]
    num_cached: np.ndarray
    client: np.ndarray
    structured: np.ndarray
    logprobs: np.ndarray


class Batch:
    """The rows that steps schedule, and what is handed out of them; the same objects as long as the rows are the same.

    ``rows`` are indices, -1 where a request has left its row since, or None for the first ``len(req_ids)`` rows.
    """

    def __init__(self, rows: Listed, active: np.ndarray | None) -> None:
        self.rows = active
        at: slice | np.ndarray = slice(None) if active is None else active
        self.req_ids = rows.req_ids.copy() if active is None else [rows.req_ids[row] for row in active.tolist()]
        self.counts = dict.fromkeys(self.req_ids, 1)
        self.id_set: set[str] = set()
        """The ids, once a step has scheduled nobody else; vLLM may clear it."""
        self.num_cached: list[int] = rows.num_cached[at].tolist()
        self.clients: list[int] = rows.client[at].tolist()
        self.client = self.clients[0] if len(set(self.clients)) == 1 else None
        """Of all of them; None if they have several."""
        self.structured: list[int] = np.flatnonzero(rows.structured[at]).tolist()
        self.logprobs: list[int] = np.flatnonzero(rows.logprobs[at]).tolist()
        """Places in the batch, not rows."""


class Due:
    """What a step has to do to the cache: rows that enter a block, rows whose block enters the prefix cache."""

    def __init__(self, rows: np.ndarray, entering: np.ndarray, caching: np.ndarray) -> None:
        self.rows, self.entering, self.caching = rows, entering, caching
