"""Per-request arrays of the scheduler, and how they grow."""

import numpy as np

MAX_STOPS = 8
"""Largest number of tokens that may end a request in a row, its end-of-sequence token included."""
NEVER = 1 << 62

FIELDS = (
    "computed",  # num_computed_tokens
    "known",  # num_tokens
    "placeholders",  # num_output_placeholders
    "written",  # tokens that the request's own lists hold
    "next_block",  # computed tokens at which a cache block must be added
    "next_cached",  # known tokens at which another block enters the prefix cache
    "next_full",  # known tokens at which another block can be hashed
    "next_left",  # computed tokens at which another block may leave a window
    "last",  # computed tokens from which on vLLM may schedule no further step
    "next_event",  # computed tokens at which a step may have an event for the row
    "next_output",  # known tokens at which an output may have an event for the row
    "length",  # num_prompt_tokens + max_tokens
    "cap",  # known tokens at which the request ends
    "prompt",  # num_prompt_tokens
    "num_cached",  # num_cached_tokens, if this vLLM has it
    "num_external",  # num_external_computed_tokens, if this vLLM has it
    "in_flight",  # num_in_flight_tokens, if this vLLM has it, less computed, plus known
    "last_step",  # last_sched_seq, if this vLLM has it
    "client",  # client_index
    "structured",  # whether a grammar follows the tokens
    "logprobs",  # whether log probabilities are asked for
    "idle",  # whether vLLM schedules no further step, though the request still runs
)


class RequestArrays:
    """``FIELDS`` as int64 arrays [rows]; also, for each row, a block's tokens and the tokens that end the request."""

    computed: np.ndarray
    known: np.ndarray
    placeholders: np.ndarray
    written: np.ndarray
    next_block: np.ndarray
    next_cached: np.ndarray
    next_full: np.ndarray
    next_left: np.ndarray
    last: np.ndarray
    next_event: np.ndarray
    next_output: np.ndarray
    length: np.ndarray
    cap: np.ndarray
    prompt: np.ndarray
    num_cached: np.ndarray
    num_external: np.ndarray
    in_flight: np.ndarray
    last_step: np.ndarray
    client: np.ndarray
    structured: np.ndarray
    logprobs: np.ndarray
    idle: np.ndarray

    def __init__(self, block_size: int) -> None:
        self._numbers: np.ndarray = np.zeros((len(FIELDS), 0), np.int64)
        self._tokens: np.ndarray = np.zeros((0, block_size), np.int64)
        """Tokens that the request's own lists lack, by row and position in the block."""
        self._stops: np.ndarray = np.zeros((MAX_STOPS, 0), np.int64)
        self._num_stops = 0
        """Largest number of stop tokens of any row since the rows were last empty."""
        self._show(0)

    def _reserve(self, count: int) -> None:
        capacity = self._numbers.shape[1]
        if count > capacity:
            more = max(count, 2 * capacity, 64) - capacity
            self._numbers = np.hstack((self._numbers, np.zeros((len(FIELDS), more), np.int64)))
            self._tokens = np.vstack((self._tokens, np.zeros((more, self._tokens.shape[1]), np.int64)))
            self._stops = np.hstack((self._stops, np.full((MAX_STOPS, more), -1)))

    def _move_up(self, rows: np.ndarray) -> None:
        """Moves these rows to the front, in order."""
        self._numbers[:, : len(rows)] = self._numbers[:, rows]
        self._tokens[: len(rows)] = self._tokens[rows]
        self._stops[:, : len(rows)] = self._stops[:, rows]

    def _show(self, count: int) -> None:
        """Makes the arrays views of the first ``count`` rows."""
        for name, numbers in zip(FIELDS, self._numbers, strict=True):
            setattr(self, name, numbers[:count])
        self._all = np.arange(count)

    def _set_stops(self, row: int, stops: list[int]) -> None:
        self._stops[:, row] = -1
        self._stops[: len(stops), row] = stops
        self._num_stops = max(self._num_stops, len(stops))
