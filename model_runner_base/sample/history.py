"""Output tokens on the host, for the rules that look back on them, and for those alone.

Sampled tokens stay on the device and the engine reads them late. A stage that needs them on the host calls
``catch_up``, which waits for the steps before this one; this step's forward is on its way by then.
"""

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps
from model_runner_base.input_batch import InputBatch
from model_runner_base.request_states import RequestInfo


class OutputHistory:
    """Fills in ``RequestInfo.output_token_ids``."""

    def __init__(self, device_ops: DeviceOps) -> None:
        self._device_ops = device_ops
        self._infos: dict[int, RequestInfo] = {}
        self._pending: list[tuple[torch.Tensor, list[tuple[int, RequestInfo]]]] = []

    def set(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        """A request took a row; ``token_ids`` are its prompt and all output tokens so far."""
        self.catch_up()  # What is on its way for it is in token_ids already.
        info.output_token_ids[:] = token_ids[info.num_prompt_tokens :]
        self._infos[row] = info

    def record(self, batch: InputBatch, looking_back: np.ndarray, tokens: torch.Tensor) -> None:
        """Notes a step's tokens [S] for the requests at indices ``looking_back``, all of which yield one."""
        rows = batch.rows[looking_back].tolist()
        infos = [self._infos[row] for row in rows]
        self._pending.append((tokens, list(zip(looking_back.tolist(), infos, strict=True))))

    def catch_up(self) -> None:
        for tokens, entries in self._pending:
            values = self._device_ops.to_host(tokens)
            for index, info in entries:
                info.output_token_ids.append(int(values[index]))
        self._pending.clear()
