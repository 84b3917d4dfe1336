"""Tokens of earlier steps on the host, for the rules of requests that read them.

Sampled tokens stay on the device, and the engine reads them late. A stage that needs them on the host calls
``catch_up``, which waits for the steps before this one. By then this step's forward pass is already launched.
"""

from collections import deque
from weakref import ref

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.request_states import RequestInfo

MAX_IN_FLIGHT = 2
"""Number of steps that asynchronous scheduling keeps launched and unread."""


class OutputHistory:
    """Appends sampled tokens to ``RequestInfo.output_token_ids``, of requests whose rules read them."""

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
