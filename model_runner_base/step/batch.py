"""The batch of one step: which requests, from where in them, how many tokens."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass
class InputBatch:
    """The scheduled requests of one step: R requests, those with a decode row first.

    While a step is repeated one batch serves them all: its ``num_computed`` and ``seq_lens`` move on in place.
    """

    req_ids: list[str]
    num_tokens: int
    """Scheduled, padding not counted."""
    rows: np.ndarray
    """[R] row of each request in the request states."""
    query_len: np.ndarray
    """[R] tokens scheduled."""
    query_start: np.ndarray
    """[R] index of each request's first token in the step. Once the batch is packed, padding that lies between decode
    rows and chunks is counted."""
    num_computed: np.ndarray
    """[R] tokens in the cache before this step."""
    seq_lens: np.ndarray
    """[R] tokens in the cache after this step."""
    is_sampled: np.ndarray
    """[R] bool: whether the request yields a token, that is, no later chunk of its prompt is left."""
    num_sampled: int
    """How many do."""
    num_decodes: int
    """How many of the requests, from the first on, have a decode row."""
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
