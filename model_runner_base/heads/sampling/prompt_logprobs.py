"""Log probabilities of prompt tokens, computed chunk by chunk with the prompt."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.logprobs import NO_LOGPROBS, DeviceLogprobs, LogprobsGatherer, resolve_count
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.packing import pad_into
from model_runner_base.step.request_states import RequestInfo


@dataclass
class PromptChunk:
    """Log probabilities that one step computed for a part of a request's prompt."""

    req_id: str
    whole: LogprobsTensors
    """Results for the whole prompt, in host memory; each chunk fills in its tokens."""
    pieces: list[tuple[slice, DeviceLogprobs]]
    """Tokens of ``whole``, and the values that belong there."""
    is_last: bool

    def store(self, device_ops: DeviceOps) -> None:
        """Waits for the pieces and writes them at their tokens in ``whole``."""
        for tokens, values in self.pieces:
            _store(self.whole, tokens, values, device_ops)


def _store(whole: LogprobsTensors, tokens: slice, piece: DeviceLogprobs, device_ops: DeviceOps) -> None:
    found = piece.begin_to_host(tokens.stop - tokens.start, device_ops)()
    for target, values in zip(whole[:3], found[:3], strict=True):
        # Assigned through NumPy: the target may be an inference tensor, and this may run outside of inference mode.
        target.numpy()[tokens] = values  # type: ignore[union-attr]


class PromptLogprobs:
    """Computes log probabilities for requests that ask for them, until their prompts are done.

    Hidden states become logits ``num_logits`` at a time, so that memory and compiled sizes do not grow with the prompt.
    ``compute_logits`` takes the hidden states, the indices of some of them, and the request's row (``LateLogits``).
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor, np.ndarray, int | None], torch.Tensor],
        gatherer: LogprobsGatherer,
        num_logits: int,
        vocab_size: int,
        device_ops: DeviceOps,
    ) -> None:
        self._compute_logits = compute_logits
        self._gatherer = gatherer
        self._num_logits = num_logits
        self._vocab_size = vocab_size
        self._device_ops = device_ops
        self._waiting: dict[str, tuple[RequestInfo, LogprobsTensors]] = {}

    def admit(self, req_id: str, info: RequestInfo) -> None:
        """Notes a request that is scheduled for the first time."""
        count = resolve_count(info.params.prompt_logprobs, self._vocab_size)
        if count != NO_LOGPROBS:
            self._waiting[req_id] = info, LogprobsTensors.empty_cpu(info.num_prompt_tokens - 1, count + 1)

    def release(self, req_id: str) -> None:
        self._waiting.pop(req_id, None)

    def collect(self, batch: InputBatch, hidden_states: torch.Tensor) -> list[PromptChunk]:
        """Launches the log probabilities of all prompt tokens that the step computed. ``hidden_states`` [T, hidden]."""
        if not self._waiting:
            return []
        indices = [index for index, req_id in enumerate(batch.req_ids) if req_id in self._waiting]
        return [self._chunk(batch, index, hidden_states) for index in indices]

    def _chunk(self, batch: InputBatch, index: int, hidden_states: torch.Tensor) -> PromptChunk:
        req_id = batch.req_ids[index]
        info, whole = self._waiting[req_id]
        start = int(batch.num_computed[index])
        # The last prompt token is followed by no prompt token.
        stop = min(int(batch.seq_lens[index]), info.num_prompt_tokens - 1)
        pieces = []
        for begin in range(start, stop, self._num_logits):
            tokens = slice(begin, min(begin + self._num_logits, stop))
            offset = int(batch.query_start[index]) - start
            piece = self._gather(info, batch.rows[index], tokens, offset, whole.logprobs.shape[1] - 1, hidden_states)
            if piece.full is None:
                pieces.append((tokens, piece))
            else:  # A value for each token of the vocabulary: too much to keep on the device until the step is read.
                _store(whole, tokens, piece, self._device_ops)
        is_last = bool(batch.is_sampled[index])
        if is_last:
            del self._waiting[req_id]
        return PromptChunk(req_id, whole, pieces, is_last)

    def _gather(
        self, info: RequestInfo, row: int, tokens: slice, offset: int, count: int, hidden_states: torch.Tensor
    ) -> DeviceLogprobs:
        """Launches log probabilities for prompt ``tokens`` of the request in ``row``.

        The hidden states of those tokens are at ``tokens`` + ``offset``.
        """
        indices, targets = np.zeros((2, self._num_logits), np.int32)
        pad_into(indices, np.arange(tokens.start, tokens.stop) + offset, 0)
        pad_into(targets, np.array(info.prompt_token_ids[tokens.start + 1 : tokens.stop + 1]), 0)
        logits = self._compute_logits(hidden_states, indices, row)
        return self._gatherer.gather(count, logits, self._device_ops.to_device(targets))

    def warm_up(self, hidden_states: torch.Tensor) -> None:
        """Runs its functions on the device once; ``hidden_states`` [T, hidden] of a size that steps run at."""
        indices = np.zeros(self._num_logits, np.int32)
        logits = self._compute_logits(hidden_states, indices, None)
        self._gatherer.warm_up(logits, self._device_ops.to_device(indices))
