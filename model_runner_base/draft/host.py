"""Drafters on the host. They read all of a request's tokens, so each step is read before the next is scheduled."""

from collections.abc import Sequence

import numpy as np

from model_runner_base.draft.drafter import Drafter
from model_runner_base.heads.outputs import DraftTokenIds, ModelRunnerOutput
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.components import RepeatPart
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_states import RequestInfo, RequestStates
from model_runner_base.step.sizes import StepSize


class HostDrafter(Drafter):
    """Base of drafters on the host: keeps each request's tokens up to date; ``look_up`` of a subclass drafts."""

    reads = ("token_ids",)

    def __init__(self, requests: RequestStates) -> None:
        self._requests = requests
        self._num_tokens = np.zeros(requests.max_num_reqs, np.int64)
        """[rows] tokens of each request, output included."""
        self._drafts: dict[str, list[int]] = {}

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self._num_tokens[row] = len(token_ids)

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Writes the drafts after each row's last token.

        They replace numbers that refer to drafts in ``DeviceRows``, where host drafters put none.
        """
        token_ids = views["token_ids"]
        for req_id, drafts in batch.drafts.items():
            first = int(batch.query_start[batch.req_id_to_index[req_id]]) + 1
            token_ids[first : first + len(drafts)] = drafts

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart] | None:
        """Returns None, since each step has other drafts in its buffer and cannot be repeated."""
        return None

    def read_output(self, batch: InputBatch, output: ModelRunnerOutput) -> None:
        self._drafts = {}
        requests, drafted = self._requests, list[tuple[str, int, int]]()
        for req_id, row, tokens in zip(batch.req_ids, batch.rows.tolist(), output.sampled_token_ids, strict=True):
            start = self._num_tokens[row]
            # Tokens beyond the longest length are dropped: the request is finished.
            tokens = tokens[: max(0, requests.token_ids.shape[1] - start)]
            requests.token_ids[row, start : start + len(tokens)] = tokens
            self._num_tokens[row] += len(tokens)
            if tokens:
                drafted.append((req_id, row, len(tokens)))
        if drafted:
            req_ids, *numbers = map(list, zip(*drafted, strict=True))
            rows, num_new = map(np.array, numbers)
            drafts = self.look_up(req_ids, rows, self._num_tokens[rows], num_new)
            self._drafts = dict(zip(req_ids, drafts, strict=True))

    def take(self, requests: dict[str, int]) -> DraftTokenIds | None:
        return DraftTokenIds(list(self._drafts), list(self._drafts.values()))

    def look_up(
        self, req_ids: list[str], rows: np.ndarray, num_tokens: np.ndarray, num_new: np.ndarray
    ) -> list[list[int]]:
        """Returns drafts for the requests in ``rows`` [R]; some may have none.

        Each request has ``num_tokens`` [R] tokens, of which the last ``num_new`` [R] have just been sampled.
        """
        raise NotImplementedError
