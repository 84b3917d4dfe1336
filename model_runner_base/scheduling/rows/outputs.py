"""Makes outputs of rows for the front ends, and merges them with the outputs of vLLM's own code."""

from collections.abc import Sequence
from itertools import repeat

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from model_runner_base.scheduling.rows.batch import Batch

_FIELDS = EngineCoreOutput.__struct_fields__
_BETWEEN = _FIELDS.index("num_cached_tokens") - 2 if "num_cached_tokens" in _FIELDS else None
"""Number of fields between the tokens and ``num_cached_tokens``, none of which a plain token sets; None if this vLLM
has no such field."""

Merged = dict[int, EngineCoreOutputs]


def plain_outputs(batch: Batch, token_lists: Sequence[list[int]]) -> list[EngineCoreOutput | None]:
    """Makes an output for each request of the batch, none of which ends."""
    further = () if _BETWEEN is None else (*repeat(repeat(None), _BETWEEN), batch.num_cached)
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
