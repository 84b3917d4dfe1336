"""Request states as a struct of arrays: one row for each request, and rows never move.

A request has its row from the step that first schedules it until it finishes or is preempted. The data that a preempted
request needs to come back is kept apart, so ``max_num_reqs`` rows serve any number of preempted requests.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec

from model_runner_base.step.host_loops import int_array, put_ints


@dataclass(slots=True, weakref_slot=True)
class RequestInfo:
    """Data of a request that survives a preemption."""

    params: Any
    """Parameters that the head reads: vLLM's ``SamplingParams`` or ``PoolingParams``."""
    seed: int
    """The request's own seed, or one drawn for it; 0 where nothing is drawn."""
    prompt_token_ids: list[int]
    """Token ids of the prompt; zeros for embeddings."""
    prompt_embeds: torch.Tensor | None = None
    """[prompt, hidden] embeddings on the host, in place of ids; a row of NaN is a token."""
    adapter: LoRARequest | None = None
    """Low-rank adapter that the request runs with."""
    items: Sequence[MultiModalFeatureSpec] = ()
    """Images and other items of the prompt, with their positions."""
    output_token_ids: list[int] = field(default_factory=list)
    """Output so far, kept up to date only if a sampling rule reads it (heads/sampling/stage.py); always the same
    list."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class RequestStates:
    """Tokens and progress of every request that holds a row.

    Tokens sampled on the device are not copied back into ``token_ids``: the device keeps each row's last token, and the
    scheduler sends all tokens of a request when it resumes. So ``num_known`` stays as it was when the row was filled.
    Two comparisons say the rest: a row is sampled once ``seq_len >= num_known``, and its last input token is on the
    device once ``seq_len > num_known``.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int) -> None:
        self.max_num_reqs = max_num_reqs
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.num_known = np.zeros(max_num_reqs, np.int64)
        self.num_computed = np.zeros(max_num_reqs, np.int64)
        self.rows: dict[str, int] = {}
        self.infos: dict[str, RequestInfo] = {}
        self.by_row: list[RequestInfo | None] = [None] * max_num_reqs
        self._free = list(range(max_num_reqs - 1, -1, -1))
        self._last_step = np.zeros(max_num_reqs, np.int64)
        """Number of the last step that was built with each row; repeated steps do not count."""
        self._num_steps = 0

    def rows_of(self, req_ids: Sequence[str]) -> np.ndarray:
        """[R] int64 rows of requests; there is at least one request, and each holds a row."""
        rows = itemgetter(*req_ids)(self.rows)  # Takes half the time of a loop.
        return int_array(rows if len(req_ids) > 1 else (rows,))

    def infos_of(self, rows: np.ndarray) -> list[RequestInfo]:
        """Infos of the requests in ``rows``, all of which are in use."""
        return [info for row in rows.tolist() if (info := self.by_row[row]) is not None]

    def admit(self, req_id: str, info: RequestInfo, token_ids: list[int], num_computed: int) -> int:
        """Gives a request a row, or refills the one it has, and returns it."""
        self.infos[req_id] = info
        row = self.rows.get(req_id)
        if row is None:
            row = self.rows[req_id] = self._free.pop()
        self.by_row[row] = info
        put_ints(token_ids, self.token_ids[row])
        self.num_known[row] = len(token_ids)
        self.num_computed[row] = num_computed
        return row

    def free_rows_for(self, arriving: Collection[str], scheduled: Collection[str]) -> None:
        """Frees rows, so that each request of ``arriving``, which are among the scheduled ones, can have one.

        The scheduler may set a request aside without telling the runner: a streaming session that waits for input, or a
        forced preemption. Such a request comes back with all its tokens and blocks, so its row can be freed. But a
        running request may miss a step, too, and is not sent anew when it comes back. So rows that were in no step for
        the longest time are freed first.
        """
        if len(arriving) <= len(self._free):
            return
        count = sum(req_id not in self.rows for req_id in arriving)
        idle = sorted(self.rows.keys() - set(scheduled), key=lambda req_id: self._last_step[self.rows[req_id]])
        for req_id in idle[: max(0, count - len(self._free))]:
            self.release(req_id)

    def note_step(self, rows: np.ndarray) -> None:
        """Notes that a step is built with the requests in ``rows``."""
        self._num_steps += 1
        self._last_step[rows] = self._num_steps

    def release(self, req_id: str) -> None:
        """Frees the row of a preempted request; does nothing if it holds none."""
        row = self.rows.pop(req_id, None)
        if row is not None:
            self.by_row[row] = None
            self._free.append(row)

    def forget(self, req_id: str) -> None:
        """Forgets a finished request; ignores an unknown one, which was aborted before it ran."""
        self.release(req_id)
        self.infos.pop(req_id, None)

    @property
    def num_reqs(self) -> int:
        return len(self.rows)
