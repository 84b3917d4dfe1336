"""Output tokens on the host, for the rules that look back on them, and for those alone.

Sampled tokens stay on the device and the engine reads them late. A stage that needs them on the host calls
``catch_up``, which waits for the steps before this one; this step's forward is on its way by then.
"""

from collections import deque
from weakref import ref

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps
from model_runner_base.requests.states import RequestInfo

MAX_IN_FLIGHT = 2
"""Steps that asynchronous scheduling keeps launched and unread."""


class OutputHistory:
    """Fills in ``RequestInfo.output_token_ids``."""

    def __init__(self, device_ops: DeviceOps) -> None:
        self._device_ops = device_ops
        self._pending: deque[tuple[torch.Tensor, list[tuple[int, int, ref[RequestInfo]]]]] = deque()
        """Steps that are not read yet. They keep no request that has finished meanwhile."""

    def admit(self, info: RequestInfo, token_ids: list[int]) -> None:
        """A request took a row; ``token_ids`` are its prompt and all output tokens so far."""
        info.output_token_ids[:] = token_ids[info.num_prompt_tokens :]
        # What is on its way for it is in token_ids already.
        for _, entries in self._pending:
            entries[:] = [entry for entry in entries if entry[-1]() is not info]

    def record(self, starts: np.ndarray, counts: np.ndarray, infos: list[RequestInfo], tokens: torch.Tensor) -> None:
        """Notes a step's tokens [S]: of each of ``infos`` those ``counts`` from ``starts`` on that are not -1."""
        self._pending.append((tokens, list(zip(starts.tolist(), counts.tolist(), map(ref, infos), strict=True))))
        if len(self._pending) > MAX_IN_FLIGHT:  # The engine has read so old a step itself.
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
