"""Prompt lookup: what followed the last time that a request had its last few tokens.

As vLLM has it (``v1/spec_decode/ngram_proposer.py``): the longest such match of ``prompt_lookup_min`` to
``prompt_lookup_max`` tokens counts, of equal ones the earliest; what follows it is the draft.

Example, with matches of 2 tokens and 3 drafts: behind "5 6 7 8 1 5 6" the draft is "7 8 1".
"""

from collections.abc import Sequence

import numpy as np

from model_runner_base.draft.drafter import Drafter
from model_runner_base.host_loops import compiled
from model_runner_base.requests.states import RequestInfo, RequestStates
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.repeat import RepeatPart
from model_runner_base.step.sizes import StepSize
from model_runner_base.vllm_port.outputs import DraftTokenIds, ModelRunnerOutput


class HostDrafter(Drafter):
    """Drafts on the host, from all of a request's tokens; so each step is read before the next one is scheduled."""

    def __init__(self, requests: RequestStates) -> None:
        self._requests = requests
        self._num_tokens = np.zeros(requests.max_num_reqs, np.int64)
        """[rows] tokens of each request, output included."""
        self._drafts: dict[str, list[int]] = {}

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self._num_tokens[row] = len(token_ids)

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """The drafts stand behind each row's last token, in place of what the device knows of none."""
        token_ids = views["token_ids"]
        for req_id, drafts in batch.drafts.items():
            first = int(batch.query_start[batch.req_id_to_index[req_id]]) + 1
            token_ids[first : first + len(drafts)] = drafts

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart] | None:
        """Each step has drafts of its own in the buffer."""
        return None

    def read(self, batch: InputBatch, output: ModelRunnerOutput) -> None:
        self._drafts = {}
        requests, drafted = self._requests, []
        for req_id, row, tokens in zip(batch.req_ids, batch.rows.tolist(), output.sampled_token_ids, strict=True):
            start = self._num_tokens[row]
            # A request that has reached the longest length is over; it has no room for more.
            tokens = tokens[: max(0, requests.token_ids.shape[1] - start)]
            requests.token_ids[row, start : start + len(tokens)] = tokens
            self._num_tokens[row] += len(tokens)
            if tokens:
                drafted.append((req_id, row))
        if drafted:
            rows = np.array([row for _, row in drafted])
            drafts = self.look_up(rows, self._num_tokens[rows])
            self._drafts = {req_id: each for (req_id, _), each in zip(drafted, drafts, strict=True)}

    def take(self, requests: dict[str, int]) -> DraftTokenIds | None:
        return DraftTokenIds(list(self._drafts), list(self._drafts.values()))

    def look_up(self, rows: np.ndarray, num_tokens: np.ndarray) -> list[list[int]]:
        """The drafts of the requests in ``rows`` [R], which have ``num_tokens`` [R]; none may be empty lists."""
        raise NotImplementedError


class NgramDrafter(HostDrafter):
    def __init__(self, requests: RequestStates, shortest: int, longest: int, num_drafts: int) -> None:
        super().__init__(requests)
        self._lengths = shortest, longest
        self._num_drafts = num_drafts
        self.look_up(np.zeros(1, np.int64), np.zeros(1, np.int64))  # Compiled ahead.

    def look_up(self, rows: np.ndarray, num_tokens: np.ndarray) -> list[list[int]]:
        starts = np.empty(len(rows), np.int64)
        known = self._requests.token_ids
        find_matches(*self._lengths, known, rows, num_tokens, starts)
        ends = np.minimum(starts + self._num_drafts, num_tokens)
        places = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        return [known[row, start:end].tolist() if start else [] for row, start, end in places]


@compiled
def find_matches(
    shortest: int, longest: int, known: np.ndarray, rows: np.ndarray, num_tokens: np.ndarray, starts: np.ndarray
) -> None:
    """Where the tokens that follow a match begin, [R]; 0 if there is no match. ``known`` [rows, positions]."""
    for index in range(len(rows)):
        tokens, count = known[rows[index]], num_tokens[index]
        best = shortest - 1
        starts[index] = 0
        for end in range(shortest, count):
            length = 0
            while length < longest and length < end and tokens[end - 1 - length] == tokens[count - 1 - length]:
                length += 1
            if length > best:
                best = length
                starts[index] = end
                if best == longest:
                    break
