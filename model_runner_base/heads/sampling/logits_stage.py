"""Stages between the model's logits and the sampler: each applies one group of SamplingParams fields.

A batch passes only the stages that one of its requests asks for, so an unused feature costs nothing. The graph policy
wraps the functions that a stage runs on the device. They are warmed up for every number of rows, so using a stage
compiles nothing. A stage may read the tokens of earlier steps in an ``OutputHistory``.

Custom logits processors, which users and plugins add, run in stages, too (``CustomStages``). They are Python code over
tensors whose shapes they choose, so they run eagerly: on the device if it can do that, else on the host, to which the
logits are copied. vLLM's built-in ones are stages or parts of the sampler instead.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.call import Forward
from model_runner_base.step.request_states import RequestInfo, RequestStates


class LogitsStage:
    """Stage interface. A ``row`` is a request's row in ``RequestStates``."""

    def asked_by(self, params: SamplingParams) -> bool:
        """Whether a request needs this stage."""
        raise NotImplementedError

    def looks_back(self, params: SamplingParams) -> bool:
        """Whether the stage reads ``output_token_ids`` of a request that asked for it."""
        return False

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        """Called when a request that asks for the stage takes a row; ``token_ids`` are its prompt and output so far."""

    def apply(self, forward: Forward, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        """Applies the stage's rules to the logits [S, V] float32, and returns the result.

        ``asking``: indices in the batch, at least one, of the requests that ask for the stage and yield a token.
        ``InputBatch.logits_rows`` gives their logits rows.
        """
        raise NotImplementedError

    def warm_up(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        """Runs all functions of the stage on the device once, on padding rows."""


MAX_IN_FLIGHT = 2
"""Number of steps that asynchronous scheduling keeps launched and unread."""


class OutputHistory:
    """Appends sampled tokens to ``RequestInfo.output_token_ids``, of requests whose rules read them.

    Sampled tokens stay on the device, and the engine reads them late. A stage that needs them on the host calls
    ``catch_up``, which waits for the steps before this one. By then this step's forward pass is already launched.
    """

    def __init__(self, device_ops: DeviceOps) -> None:
        self._device_ops = device_ops
        self._pending: deque[tuple[torch.Tensor, list[tuple[int, int, ref[RequestInfo]]]]] = deque()
        """Steps that are not read yet; weak references, so that finished requests are not kept alive."""

    def admit(self, info: RequestInfo, token_ids: list[int]) -> None:
        """Notes a request that takes a row; ``token_ids`` are its prompt and all output tokens so far."""
        info.output_token_ids[:] = token_ids[info.num_prompt_tokens :]
        # token_ids already has the request's tokens of the pending steps.
        for _, entries in self._pending:
            entries[:] = [entry for entry in entries if entry[-1]() is not info]

    def record(self, starts: np.ndarray, counts: np.ndarray, infos: list[RequestInfo], tokens: torch.Tensor) -> None:
        """Notes the tokens [S] that a step sampled.

        Request i of ``infos`` has the ``counts[i]`` tokens from ``starts[i]`` on; of these, -1 is skipped.
        """
        self._pending.append((tokens, list(zip(starts.tolist(), counts.tolist(), map(ref, infos), strict=True))))
        if len(self._pending) > MAX_IN_FLIGHT:  # The engine has read this step, so there is no wait.
            self._store_oldest()

    def catch_up(self) -> None:
        while self._pending:
            self._store_oldest()

    def _store_oldest(self) -> None:
        tokens, entries = self._pending.popleft()
        values = self._device_ops.to_host(tokens)
        for start, count, request in entries:
            info = request()
            if info is not None:
                info.output_token_ids += [token for token in values[start : start + count].tolist() if token >= 0]


@dataclass(frozen=True)
class CustomStages:
    """Stages that run custom processors; by default there are none."""

    before_penalties: Sequence[LogitsStage] = ()
    after_penalties: Sequence[LogitsStage] = ()
    has_min_p: bool = False
    """Whether a stage applies min-p, so that the sampler must not."""


class CustomProcessors(ABC):
    """Loaded custom processors of one interface of vLLM."""

    @abstractmethod
    def stages(self, requests: RequestStates, history: OutputHistory, device_ops: DeviceOps) -> CustomStages:
        """Makes the stages that run the processors; called once, when the engine starts."""
