"""Rows of a step, and their outputs for the front ends, which are merged with the outputs of vLLM's own code."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats


class BatchSource(Protocol):
    """Attributes of the rows that a batch reads."""

    req_ids: list[str]
    num_cached: np.ndarray
    num_external: np.ndarray
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
        self.num_external: list[int] = rows.num_external[at].tolist() if rows.num_external[at].any() else []
        """Tokens that a KV connector has loaded, by request; empty if there are none."""
        self.clients: list[int] = rows.client[at].tolist()
        self.client = self.clients[0] if len(set(self.clients)) == 1 else None
        """Client of all requests; None if they have several clients."""
        self.structured: list[int] = np.flatnonzero(rows.structured[at]).tolist()
        self.logprobs: list[int] = np.flatnonzero(rows.logprobs[at]).tolist()
        """``structured`` and ``logprobs`` hold places in the batch, not rows."""


class RowEvents:
    """Rows with an event in a step; of these, the rows that enter a block, those whose block is to be cached, and those
    with a block that may have left a window."""

    def __init__(self, rows: np.ndarray, entering: np.ndarray, caching: np.ndarray, leaving: np.ndarray) -> None:
        self.rows, self.entering, self.caching, self.leaving = rows, entering, caching, leaving


_FIELDS = EngineCoreOutput.__struct_fields__
_BETWEEN = _FIELDS.index("num_cached_tokens") - 2 if "num_cached_tokens" in _FIELDS else None
"""Number of fields between the tokens and ``num_cached_tokens``, none of which a plain token sets; None if this vLLM
has no such field."""

Merged = dict[int, EngineCoreOutputs]


def plain_outputs(batch: Batch, token_lists: Sequence[list[int]]) -> list[EngineCoreOutput | None]:
    """Makes an output for each request of the batch, none of which ends."""
    further: list[Iterable[Any]] = []
    if _BETWEEN is not None:
        further = [*repeat(repeat(None), _BETWEEN), batch.num_cached]
        if batch.num_external:
            further.append(batch.num_external)  # The field after ``num_cached_tokens``.
    return list(map(EngineCoreOutput, batch.req_ids, token_lists, *further))


def merge(
    batch: Batch, outputs: list[EngineCoreOutput | None], their_places: Sequence[int], theirs: Merged
) -> dict[int, EngineCoreOutputs]:
    """Merges all outputs by client, in vLLM's order.

    ``theirs`` are the outputs of vLLM's own code: first those of the requests at ``their_places`` in the batch,
    which go to these places of ``outputs``; then those of requests outside the batch.
    """
    their_ids = {batch.req_ids[place] for place in their_places}
    if their_ids:
        made = {output.request_id: output for them in theirs.values() for output in them.outputs}
        for place in their_places:
            outputs[place] = made.get(batch.req_ids[place])
    merged: Merged = {}
    for client, ours in _by_client(batch, outputs, bool(their_ids)).items():
        them = theirs.get(client)
        if them is None:
            merged[client] = EngineCoreOutputs(outputs=ours)
        else:
            ours += _without(them.outputs, their_ids)
            them.outputs = ours
            merged[client] = them
    stats: SchedulerStats | None = None
    for client, them in theirs.items():
        if them.scheduler_stats is not None:
            stats, them.scheduler_stats = them.scheduler_stats, None
        if client not in merged and (them.outputs or them.finished_requests is not None):
            merged[client] = them
    if stats is not None:
        # vLLM returns the statistics to one front end, even if there are no outputs.
        if not merged:
            merged[0] = EngineCoreOutputs()
        next(iter(merged.values())).scheduler_stats = stats
    return merged


def _by_client(
    batch: Batch, outputs: list[EngineCoreOutput | None], has_gaps: bool
) -> dict[int, list[EngineCoreOutput]]:
    if batch.client is not None:
        present = [output for output in outputs if output is not None] if has_gaps else outputs
        return {batch.client: present} if present else {}  # type: ignore[dict-item]
    by_client: dict[int, list[EngineCoreOutput]] = {}
    for client, output in zip(batch.clients, outputs, strict=True):
        if output is not None:
            by_client.setdefault(client, []).append(output)
    return by_client


def _without(outputs: list[EngineCoreOutput], req_ids: set[str]) -> list[EngineCoreOutput]:
    return [output for output in outputs if output.request_id not in req_ids] if req_ids else outputs
