"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the request's last few tokens.

As in vLLM (``v1/spec_decode/ngram_proposer.py``), the longest match of ``prompt_lookup_min`` to ``prompt_lookup_max``
tokens is used, and the earliest of several equally long ones. The tokens after it are the drafts.

Example, with matches of 2 tokens and 3 drafts: after "5 6 7 8 1 5 6" the drafts are "7 8 1".
"""

import numpy as np

from model_runner_base.draft.host import HostDrafter
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.request_states import RequestStates


class NgramDrafter(HostDrafter):
    def __init__(self, requests: RequestStates, shortest: int, longest: int, num_drafts: int) -> None:
        super().__init__(requests)
        self._lengths = shortest, longest
        self._num_drafts = num_drafts
        zero = np.zeros(1, np.int64)
        self.look_up([], zero, zero, zero)  # Compiles ``find_matches`` at start-up.

    def look_up(
        self, req_ids: list[str], rows: np.ndarray, num_tokens: np.ndarray, num_new: np.ndarray
    ) -> list[list[int]]:
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
    """Writes to ``starts`` [R] where the tokens after each match begin; 0 if there is no match.

    ``known`` [rows, positions] are the tokens of all rows.
    """
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
