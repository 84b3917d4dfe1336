"""From the scheduler's output to the input batch, built from scratch."""

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from model_runner_base.host_loops import compiled
from model_runner_base.input_batch import InputBatch, pad_into
from model_runner_base.request_states import RequestStates


@compiled
def expand_tokens(
    rows: np.ndarray, query_len: np.ndarray, num_computed: np.ndarray, num_known: np.ndarray, known: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """From R requests to T tokens: row, position, id and source of each (see ``InputBatch``).

    ``known`` [rows, positions] int32 are the ids on the host, of which each request has ``num_known`` [R]. At most the
    last token of a request is unknown to the host: the one sampled in its last step.
    """
    num_tokens = query_len.sum()
    token_rows = np.empty(num_tokens, np.int64)
    positions = np.empty(num_tokens, np.int64)
    token_ids = np.empty(num_tokens, np.int32)
    token_sources = np.full(num_tokens, -1, np.int64)
    token = 0
    for request in range(len(rows)):
        row = rows[request]
        for position in range(num_computed[request], num_computed[request] + query_len[request]):
            token_rows[token] = row
            positions[token] = position
            token_ids[token] = known[row, position]
            token += 1
        if num_computed[request] + query_len[request] > num_known[request]:
            token_sources[token - 1] = row
    return token_rows, positions, token_ids, token_sources


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
        threshold = self._decode_threshold
        if threshold is not None:
            scheduled = dict(sorted(scheduled.items(), key=lambda request: request[1] > threshold))
        req_ids = list(scheduled)
        num_reqs = len(req_ids)
        rows = requests.rows_of(req_ids)
        query_len = np.fromiter(scheduled.values(), np.int64, num_reqs)
        num_computed = requests.num_computed[rows]
        seq_lens = num_computed + query_len
        requests.num_computed[rows] = seq_lens
        num_known = requests.num_known[rows]

        query_start = np.cumsum(query_len) - query_len
        arrays = expand_tokens(rows, query_len, num_computed, num_known, requests.token_ids)
        token_rows, positions, token_ids, token_sources = arrays
        return InputBatch(
            req_ids=req_ids,
            rows=rows,
            query_len=query_len,
            query_start=query_start,
            num_computed=num_computed,
            seq_lens=seq_lens,
            is_sampled=seq_lens >= num_known,
            token_rows=token_rows,
            positions=positions,
            token_ids=token_ids,
            token_sources=token_sources,
        )

    def pack_padding(self, views: dict[str, np.ndarray]) -> None:
        """What of these sections is not zero in a step of nothing but padding."""
        views["token_sources"][:] = -1
        views["sample_rows"][:] = self.requests.max_num_reqs

    def pack(self, batch: InputBatch, views: dict[str, np.ndarray]) -> None:
        """Fills the sections that every step has; what attention needs, its adapter fills."""
        padding_row = self.requests.max_num_reqs
        pad_into(views["token_ids"], batch.token_ids, 0)
        pad_into(views["token_sources"], batch.token_sources, -1)
        pad_into(views["positions"], batch.positions, 0)
        pad_into(views["logits_indices"], batch.query_start + batch.query_len - 1, 0)
        # A row with prompt left yields no token: what is drawn for it is recorded nowhere.
        pad_into(views["sample_rows"], np.where(batch.is_sampled, batch.rows, padding_row), padding_row)
        pad_into(views["sample_positions"], batch.seq_lens, 0)
