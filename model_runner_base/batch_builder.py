"""From the scheduler's output to the input batch, built from scratch."""

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from model_runner_base.host_loops import compiled
from model_runner_base.input_batch import InputBatch
from model_runner_base.request_states import RequestStates, int_array


@compiled
def advance(
    rows: np.ndarray,
    query_len: np.ndarray,
    progress: np.ndarray,
    num_known: np.ndarray,
    counts: np.ndarray,
    is_sampled: np.ndarray,
) -> int:
    """Moves the ``progress`` of requests, by row, on by ``query_len``; ``num_known`` [rows] are the tokens on the host.

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
        token += query_len[request]
    return num_sampled


@compiled
def fill_tokens(
    rows: np.ndarray,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    is_sampled: np.ndarray,
    num_known: np.ndarray,
    known: np.ndarray,
    token_ids: np.ndarray,
    token_sources: np.ndarray,
    positions: np.ndarray,
    logits_indices: np.ndarray,
    sample_rows: np.ndarray,
    sample_positions: np.ndarray,
) -> None:
    """What each token is, and for each request its last token, the row that what is drawn there goes to, its position.

    ``known`` [rows, positions] int32 are the ids on the host, ``num_known`` [rows] of them. At most the last token of a
    request is unknown to the host, the one sampled in its last step: its source is the row whose last token it is.
    A row with prompt left yields no token: what is drawn for it goes to the padding row, where nobody looks.
    """
    padding_row = len(num_known)
    token_sources[:] = -1
    token = 0
    for request in range(len(rows)):
        row, start, count = rows[request], num_computed[request], query_len[request]
        for index in range(count):
            token_ids[token + index] = known[row, start + index]
            positions[token + index] = start + index
        token += count
        if start + count > num_known[row]:
            token_sources[token - 1] = row
        logits_indices[request] = token - 1
        sample_rows[request] = row if is_sampled[request] else padding_row
        sample_positions[request] = start + count
    token_ids[token:] = 0
    positions[token:] = 0
    logits_indices[len(rows) :] = 0
    sample_rows[len(rows) :] = padding_row
    sample_positions[len(rows) :] = 0


class BatchBuilder:
    """Builds the batch of a step and advances the requests' progress."""

    def __init__(self, requests: RequestStates, decode_threshold: int | None = None) -> None:
        self.requests = requests
        self._decode_threshold = decode_threshold
        """See ``AttentionAdapter``."""

    def build(self, scheduler_output: SchedulerOutput) -> InputBatch:
        """From scratch: any step."""
        requests = self.requests
        scheduled = scheduler_output.num_scheduled_tokens
        req_ids = list(scheduled)
        rows = requests.rows_of(req_ids)
        query_len = int_array(scheduled.values())
        if self._decode_threshold is not None:
            is_fresh, is_long = requests.num_computed[rows] == 0, query_len > self._decode_threshold
            order = np.argsort(np.where(is_fresh, 2, is_long), kind="stable")
            req_ids = [req_ids[index] for index in order.tolist()]
            rows, query_len = rows[order], query_len[order]
        counts, is_sampled = np.empty((3, len(rows)), np.int64), np.empty(len(rows), np.bool_)
        num_sampled = advance(rows, query_len, requests.num_computed, requests.num_known, counts, is_sampled)
        query_start, num_computed, seq_lens = counts
        return InputBatch(
            req_ids=req_ids,
            rows=rows,
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            query_len=query_len,
            query_start=query_start,
            num_computed=num_computed,
            seq_lens=seq_lens,
            is_sampled=is_sampled,
            num_sampled=num_sampled,
        )

    def pack_padding(self, views: dict[str, np.ndarray]) -> None:
        """What of these sections is not zero in a step of nothing but padding."""
        views["token_sources"][:] = -1
        views["sample_rows"][:] = self.requests.max_num_reqs

    def pack(self, batch: InputBatch, views: dict[str, np.ndarray]) -> None:
        """Fills the sections that every step has; what attention needs, its adapter fills."""
        requests = self.requests
        fill_tokens(
            batch.rows,
            batch.query_len,
            batch.num_computed,
            batch.is_sampled,
            requests.num_known,
            requests.token_ids,
            views["token_ids"],
            views["token_sources"],
            views["positions"],
            views["logits_indices"],
            views["sample_rows"],
            views["sample_positions"],
        )
