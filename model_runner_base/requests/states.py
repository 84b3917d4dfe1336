"""Request states as a struct of arrays: one row a request, rows never move.

A row lives from the step that first schedules a request until it finishes or is preempted. What a preempted request
needs to come back is kept apart, so that ``max_num_reqs`` rows serve any number of preempted requests.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams

from model_runner_base.host_loops import int_array, put_ints


@dataclass(slots=True, weakref_slot=True)
class RequestInfo:
    """What survives a preemption."""

    sampling_params: SamplingParams
    seed: int
    """The request's own seed, or one drawn for it."""
    prompt_token_ids: list[int]
    """Zeros for a prompt of embeddings."""
    prompt_embeds: torch.Tensor | None = None
    """[prompt, hidden] on the host, in place of ids."""
    adapter: LoRARequest | None = None
    """The low-rank adapter that it runs with."""
    items: Sequence[MultiModalFeatureSpec] = ()
    """The images and such of its prompt, and where they stand."""
    output_token_ids: list[int] = field(default_factory=list)
    """Kept up to date only where a rule looks back on it (heads/sampling/history.py); the list stays the same."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class RequestStates:
    """Tokens and progress of every request that holds a row.

    Tokens sampled on the device are not copied back into ``token_ids``: the device keeps each row's last token, and
    the scheduler sends all tokens of a request when it resumes. So ``num_known`` stays as it was when the row was
    filled, and two comparisons tell all: a row is sampled once ``seq_len >= num_known``, and its last input token lies
    on the device once ``seq_len > num_known``.
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
        """The number of the last step that was built with each row; those that are repeated do not count."""
        self._num_steps = 0

    def rows_of(self, req_ids: Sequence[str]) -> np.ndarray:
        """[R] the rows of requests, at least one, each of which holds one."""
        rows = itemgetter(*req_ids)(self.rows)  # Half the time of a loop.
        return int_array(rows if len(req_ids) > 1 else (rows,))

    def infos_of(self, rows: np.ndarray) -> list[RequestInfo]:
        """Those of the requests in ``rows``, each of which holds one."""
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

    def make_room(self, arriving: Collection[str], scheduled: Collection[str]) -> None:
        """Sees to it that ``arriving``, which are among the scheduled requests, can be given a row if they have none.

        The scheduler may set requests aside without a word (a streaming session that waits for input, a forced
        preemption); they come back with all their tokens and blocks, so their rows can go, first of those that were in
        no step for the longest time: one that runs may miss a step, too, and comes back with nothing.
        """
        if len(arriving) <= len(self._free):
            return
        count = sum(req_id not in self.rows for req_id in arriving)
        idle = sorted(self.rows.keys() - set(scheduled), key=lambda req_id: self._last_step[self.rows[req_id]])
        for req_id in idle[: max(0, count - len(self._free))]:
            self.release(req_id)

    def note_step(self, rows: np.ndarray) -> None:
        """A step is built with the requests in ``rows``."""
        self._num_steps += 1
        self._last_step[rows] = self._num_steps

    def release(self, req_id: str) -> None:
        """Frees the row of a preempted request; nothing happens if it holds none."""
        row = self.rows.pop(req_id, None)
        if row is not None:
            self.by_row[row] = None
            self._free.append(row)

    def forget(self, req_id: str) -> None:
        """Forgets a finished request; an unknown one (aborted before it ever ran) is ignored."""
        self.release(req_id)
        self.infos.pop(req_id, None)

    @property
    def num_reqs(self) -> int:
        return len(self.rows)
