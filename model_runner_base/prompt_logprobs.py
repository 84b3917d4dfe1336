"""Log probabilities of prompt tokens, chunk by chunk as the prompt is computed."""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from model_runner_base.device_ops import DeviceOps
from model_runner_base.graph_policy import StepFunction
from model_runner_base.input_batch import InputBatch, pad_into
from model_runner_base.request_states import RequestInfo
from model_runner_base.sample.logprobs import DeviceLogprobs, LogprobsGatherer


@dataclass
class PromptChunk:
    """Some consecutive prompt tokens of one request."""

    req_id: str
    whole: LogprobsTensors
    """All of the request's prompt, in host memory; this chunk is its rows from ``start`` on."""
    start: int
    pieces: list[DeviceLogprobs]
    """Each of ``num_rows`` rows but the last, which may have fewer."""
    num_rows: int
    count: int
    """Tokens in the chunk."""
    is_last: bool

    def store(self, device_ops: DeviceOps) -> None:
        """Waits for the chunk and writes it to its place in ``whole``."""
        start, left = self.start, self.count
        for piece in self.pieces:
            count = min(left, self.num_rows)
            rows = slice(start, start + count)
            for target, values in zip(self.whole[:3], piece.to_host(count, device_ops)[:3], strict=True):
                # Through NumPy: it may be an inference tensor, and this may run outside of inference mode.
                target.numpy()[rows] = values  # type: ignore[union-attr]
            start, left = start + count, left - count


class PromptLogprobs:
    """The requests that want them and have not got them yet.

    The model's last hidden states become logits ``num_rows`` at a time, so that memory and compiled sizes do not grow
    with the prompt.
    """

    def __init__(
        self,
        compute_logits: StepFunction,
        gatherer: LogprobsGatherer,
        num_rows: int,
        vocab_size: int,
        device_ops: DeviceOps,
    ) -> None:
        self._compute_logits = compute_logits
        self._gatherer = gatherer
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._device_ops = device_ops
        self._waiting: dict[str, tuple[RequestInfo, LogprobsTensors]] = {}

    def add(self, req_id: str, info: RequestInfo) -> None:
        """A request was scheduled for the first time."""
        count = info.sampling_params.prompt_logprobs
        if count is not None:
            columns = (self._vocab_size if count == -1 else count) + 1
            self._waiting[req_id] = info, LogprobsTensors.empty_cpu(len(info.prompt_token_ids) - 1, columns)

    def remove(self, req_id: str) -> None:
        self._waiting.pop(req_id, None)

    def collect(self, batch: InputBatch, hidden_states: torch.Tensor) -> list[PromptChunk]:
        """Launches what the step computed of waiting prompts. ``hidden_states`` [padded tokens, hidden]."""
        if not self._waiting:
            return []
        indices = [index for index, req_id in enumerate(batch.req_ids) if req_id in self._waiting]
        return [self._chunk(batch, index, hidden_states) for index in indices]

    def _chunk(self, batch: InputBatch, index: int, hidden_states: torch.Tensor) -> PromptChunk:
        req_id = batch.req_ids[index]
        info, whole = self._waiting[req_id]
        start = int(batch.num_computed[index])
        # The last prompt token has no successor in the prompt.
        count = max(0, min(int(batch.query_len[index]), len(info.prompt_token_ids) - 1 - start))
        first = int(batch.query_start[index])
        pieces = []
        for done in range(0, count, self._num_rows):
            piece = min(self._num_rows, count - done)
            rows, targets = np.zeros((2, self._num_rows), np.int32)
            pad_into(rows, np.arange(first + done, first + done + piece), 0)
            next_tokens = info.prompt_token_ids[start + done + 1 : start + done + piece + 1]
            pad_into(targets, np.array(next_tokens), 0)
            logits = self._compute_logits(hidden_states, self._device_ops.to_device(rows))
            tokens = self._device_ops.to_device(targets)
            pieces.append(self._gatherer.gather(whole.logprobs.shape[1] - 1, logits, tokens))
        is_last = bool(batch.is_sampled[index])
        if is_last:
            del self._waiting[req_id]
        return PromptChunk(req_id, whole, start, pieces, self._num_rows, count, is_last)

    def warm_up(self, hidden_states: torch.Tensor) -> None:
        """Runs what it has on the device once; ``hidden_states`` [T, hidden] of a size that steps have."""
        rows = self._device_ops.to_device(np.zeros(self._num_rows, np.int32))
        self._gatherer.warm_up(self._compute_logits(hidden_states, rows), rows)
