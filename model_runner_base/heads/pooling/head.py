"""Pooling: a step's hidden states to embeddings, classes or scores, by vLLM's own poolers on the host.

Of a request whose pooler reads one token, only that token's hidden state is copied from the device. The others' are
copied chunk by chunk, and kept until the prompt is whole. A request that was preempted begins anew.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from vllm.pooling_params import PoolingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import RequestError
from model_runner_base.heads.head import Head, PooledStep, Value
from model_runner_base.heads.pooling.components import (
    POOLED_TOKENS,
    PooledTokens,
    TokenTypes,
    check_token_types,
    has_token_types,
)
from model_runner_base.heads.pooling.pooler import HostPooler, Need, Whole
from model_runner_base.step.call import Forward, ModelCall
from model_runner_base.step.components import StepComponent
from model_runner_base.step.request_states import RequestInfo, RequestStates
from model_runner_base.step.schedule import Arrival


class _Piece(NamedTuple):
    """Hidden states of one request in one step's copy."""

    copy: Callable[[], np.ndarray]
    """Waits for the copy [T, hidden] of a step."""
    start: int
    stop: int


class PoolingHead(Head):
    """Answers every step: a request gets its value in the step that completes its prompt."""

    answers_at_once = True

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, requests: RequestStates, ops: DeviceOps) -> None:
        self._pooler = HostPooler(model, dtype)
        self._has_types = has_token_types(model)
        self._requests = requests
        self._device_ops = ops
        self._pieces: dict[str, list[_Piece]] = {}
        """Chunks of requests whose prompt is not whole yet and whose pooler reads all of it."""

    def components(self) -> Sequence[StepComponent]:
        types = [TokenTypes(self._requests.max_num_reqs)] if self._has_types else []
        return PooledTokens(self._pooler.is_first), *types

    def info_of(self, arrival: Arrival) -> RequestInfo:
        params = arrival.params
        if not isinstance(params, PoolingParams):
            raise RequestError("this model pools: requests for text are not supported")
        check_token_types(params, len(arrival.token_ids), self._has_types)
        return RequestInfo(params, 0, arrival.token_ids, arrival.prompt_embeds, arrival.adapter, arrival.items)

    def forget(self, req_id: str) -> None:
        self._pieces.pop(req_id, None)

    def traced(self, hidden_states: torch.Tensor, call: ModelCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the hidden states [L, hidden] of one token each request, and all hidden states, both in float32."""
        pooled = hidden_states[call.arrays[POOLED_TOKENS]].float()
        return pooled, call.sample_slots, hidden_states.float()

    def answer(self, forward: Forward) -> PooledStep:
        """Begins the copies that the step's requests need; a request is pooled once its prompt is whole."""
        batch, copies = forward.batch, _Copies(forward, self._device_ops)
        whole: dict[int, tuple[str, RequestInfo, list[_Piece]]] = {}
        for index, (req_id, info) in enumerate(zip(batch.req_ids, self._requests.infos_of(batch.rows), strict=True)):
            if self._pooler.need_of(info.params.task) is not Need.ALL:
                pieces = [_Piece(copies.pooled, index, index + 1)] if batch.is_sampled[index] else []
            else:
                if batch.num_computed[index] == 0:
                    self._pieces[req_id] = []
                start = int(batch.query_start[index])
                pieces = self._pieces[req_id]
                pieces.append(_Piece(copies.states, start, start + int(batch.query_len[index])))
            if batch.is_sampled[index]:
                self._pieces.pop(req_id, None)
                whole[index] = req_id, info, pieces
        num_reqs = batch.num_reqs

        def finish() -> tuple[list[Value], dict[str, str | None]]:
            requests = [
                Whole(req_id, info.params, info.prompt_token_ids, _joined(pieces))
                for req_id, info, pieces in whole.values()
            ]
            pooled, errors = self._pooler.pool(requests)
            values: list[Value] = [None] * num_reqs
            for index, value in zip(whole, pooled, strict=True):
                values[index] = value
            return values, errors

        return PooledStep(finish)


class _Copies:
    """Copies of a step's results to the host, each of which begins when a request first needs it."""

    def __init__(self, forward: Forward, device_ops: DeviceOps) -> None:
        self._forward = forward
        self._begin = device_ops.begin_to_host_from_graph

    @cached_property
    def pooled(self) -> Callable[[], np.ndarray]:
        """Waits for the hidden states [L, hidden] of one token each request."""
        return cache(self._begin(self._forward.logits))

    @cached_property
    def states(self) -> Callable[[], np.ndarray]:
        """Waits for all hidden states [T, hidden]."""
        return cache(self._begin(self._forward.hidden_states))


def _joined(pieces: Sequence[_Piece]) -> torch.Tensor:
    """[tokens, hidden] float32 hidden states of a request."""
    return torch.cat([torch.from_numpy(piece.copy()[piece.start : piece.stop]) for piece in pieces])
