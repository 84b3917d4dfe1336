"""Limit on a request's thinking tokens (``thinking_token_budget``): once it is spent, the end of thinking is forced.

The rule is that of vLLM's second model runner (``vllm/v1/worker/gpu/sample/thinking_budget.py``). A request thinks from
the last start marker on, in its prompt or its output, until the natural end marker. If it has thought for as many
tokens as its budget, the next tokens are those of the forced end, from the first that is not there yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.logits_stage import LogitsStage, OutputHistory
from model_runner_base.step.call import Forward
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.request_states import RequestInfo, RequestStates

FORCED = 1e9
"""Logit of a forced token, as in vLLM."""


@dataclass(frozen=True)
class Markers:
    """Token ids that begin and end thinking, as ``reasoning_config`` has them."""

    start: Sequence[int]
    natural_end: Sequence[int]
    forced_end: Sequence[int]

    @property
    def longest(self) -> int:
        return max(len(self.start), len(self.natural_end), len(self.forced_end))


def markers_of(vllm_config: VllmConfig) -> Markers | None:
    """Returns the engine's markers; None if it has no ``reasoning_config``, or this vLLM no such setting."""
    config: Any = getattr(vllm_config, "reasoning_config", None)
    if config is None:
        return None
    ids = config.reasoning_start_token_ids, config.natural_reasoning_end_token_ids, config.reasoning_end_token_ids
    return Markers(*map(tuple, ids)) if all(ids) else None


class Thinking:
    """Progress of one request."""

    def __init__(self, markers: Markers, budget: int, token_ids: Sequence[int]) -> None:
        self._markers = markers
        self._budget = budget
        self.num_tokens = 0
        """Number of the request's tokens that were read."""
        self._thinks_from: int | None = None
        """Number of tokens up to the end of the start marker; None while the request does not think."""
        self._tail: list[int] = []
        """Latest tokens, as many as the longest marker has."""
        # What came before the last start marker does not matter; a marker may begin among the last tokens.
        begin = min(_last_place(token_ids, markers.start), max(0, len(token_ids) - markers.longest))
        self.num_tokens = begin
        for token in token_ids[begin:]:
            self.read(token)

    def copy(self) -> "Thinking":
        """Makes a copy, which reads tokens of its own."""
        other = Thinking(self._markers, self._budget, ())
        other.num_tokens, other._thinks_from, other._tail = self.num_tokens, self._thinks_from, self._tail[:]
        return other

    def read(self, token: int) -> None:
        """Reads the request's next token."""
        self.num_tokens += 1
        self._tail = [*self._tail, token][-self._markers.longest :]
        if _ends_with(self._tail, self._markers.start):
            self._thinks_from = self.num_tokens
        elif _ends_with(self._tail, self._markers.natural_end):
            self._thinks_from = None

    def forced_token(self) -> int | None:
        """Returns the token that must come next; None if any may."""
        if self._thinks_from is None or self.num_tokens - self._thinks_from < self._budget:
            return None
        end = self._markers.forced_end
        there = max(count for count in range(len(end)) if _ends_with(self._tail, end[:count]))
        return end[there]


def _ends_with(tokens: list[int], marker: Sequence[int]) -> bool:
    return not marker or tokens[-len(marker) :] == list(marker)


def _last_place(token_ids: Sequence[int], marker: Sequence[int]) -> int:
    """Index of the last marker in ``token_ids``; their number if there is none."""
    tokens = np.asarray(token_ids)
    count = len(tokens) - len(marker) + 1
    if count <= 0:
        return len(tokens)
    found = np.ones(count, bool)
    for place, token in enumerate(marker):
        found &= tokens[place : place + count] == token
    places = np.flatnonzero(found)
    return int(places[-1]) if len(places) else len(tokens)


def _force(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [S, V], in which a row's forced token has the highest; ``tokens`` [S] int32, -1 where none is forced."""
    vocabulary = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return logits.masked_fill(vocabulary == tokens.unsqueeze(1), FORCED)


class ThinkingBudget(LogitsStage):
    """Forces the end of thinking; the last stage, so that no other weakens it."""

    def __init__(
        self,
        markers: Markers,
        requests: RequestStates,
        history: OutputHistory,
        wrap: WrapFunction,
        device_ops: DeviceOps,
    ) -> None:
        self._markers = markers
        self._requests = requests
        self._history = history
        self._function = wrap(_force, [])
        self._device_ops = device_ops
        self._thinking: dict[int, Thinking] = {}
        """Progress by row."""

    def asked_by(self, params: SamplingParams) -> bool:
        return getattr(params, "thinking_token_budget", None) is not None

    def looks_back(self, params: SamplingParams) -> bool:
        return True

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self._thinking[row] = Thinking(self._markers, info.params.thinking_token_budget, token_ids)

    def apply(self, forward: Forward, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        self._history.catch_up()
        batch = forward.batch
        thinking = [self._thinking[row] for row in batch.rows[asking].tolist()]
        for each, info in zip(thinking, self._requests.infos_of(batch.rows[asking]), strict=True):
            for token in info.output_token_ids[each.num_tokens - info.num_prompt_tokens :]:
                each.read(token)
        every = batch.logits_rows(asking)
        drafts = self._device_ops.to_host(forward.sample_slots)[2] if batch.decode_query_len > 1 else None
        forced = np.full(logits.shape[0], -1, np.int32)
        for index, owner, place in zip(*(values.tolist() for values in every), strict=True):
            state = thinking[owner]
            if place:
                assert drafts is not None
                state = thinking[owner] = state.copy() if place == 1 else state
                state.read(int(drafts[index - 1]))
            token = state.forced_token()
            if token is not None:
                forced[index] = token
        return self._function(logits, self._device_ops.to_device(forced)) if forced.max() >= 0 else logits

    def warm_up(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        self._function(logits, self._device_ops.to_device(np.full(logits.shape[0], -1, np.int32)))
