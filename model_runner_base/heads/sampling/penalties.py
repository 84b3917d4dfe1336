"""Presence, frequency and repetition penalties, counted on the device.

Each request row has a count of every token, kept where the logits are: the last sampled token is added to it there,
so nothing is read back and a step costs the same however long the outputs are.

Rules as in vLLM (and, for the first two, the OpenAI API): a token seen in prompt or output has its logit divided by the
repetition penalty if positive, multiplied if negative (Keskar et al., arXiv:1909.05858); then frequency penalty x count
in the output and presence penalty x (count > 0) are subtracted.
"""

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.graph_policy import WrapFunction
from model_runner_base.heads.sampling.stage import LogitsStage, SampleInputs
from model_runner_base.requests.device_rows import DeviceRows
from model_runner_base.requests.states import RequestInfo

IN_PROMPT = 1 << 23
"""Stands beside the output's count in the same int32; no output is that long. The two together stay below 2**24: some
devices add integers as float32."""

NEUTRAL = (0.0, 0.0, 1.0)


def _penalise(
    counts: torch.Tensor,
    logits: torch.Tensor,
    sample_slots: torch.Tensor,
    is_new: torch.Tensor,
    penalties: torch.Tensor,
    last_tokens: torch.Tensor,
) -> torch.Tensor:
    """Adds each row's last token to its counts, where ``is_new``, and applies the penalties.

    Args:
        counts: [rows, V] int32, updated in place.
        logits: [S, V] float32.
        sample_slots: [2, S] int32, of which the first are the request rows.
        is_new: [S] int32 0 or 1: whether the row's last token has not been counted yet.
        penalties: [S, 3] presence, frequency, repetition.
        last_tokens: [rows, K] int32, of which the first were sampled last.
    """
    rows = sample_slots[0]
    counts.index_put_((rows, last_tokens[rows, 0]), is_new, accumulate=True)
    count = counts[rows]
    in_output = count & (IN_PROMPT - 1)
    presence, frequency, repetition = penalties.unsqueeze(-1).unbind(1)
    repetition = torch.where(count > 0, repetition, 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - frequency * in_output - presence * (in_output > 0)


def _set_row(counts: torch.Tensor, row: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Replaces a row [1, V] of the counts, in place; returns the row's index [1]."""
    counts.index_put_((row,), values)
    return row.clone()


class Penalties(LogitsStage):
    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        device_rows: DeviceRows,
        wrap: WrapFunction,
        device_ops: DeviceOps,
    ) -> None:
        self._counts = [device_ops.zeros((max_num_reqs + 1, vocab_size), torch.int32)]
        self._device_rows = device_rows
        self._padding_row = max_num_reqs
        self._penalise = wrap(_penalise, self._counts)
        self._set_row = wrap(_set_row, self._counts)
        self._device_ops = device_ops
        self._vocab_size = vocab_size
        self._penalties = np.zeros((max_num_reqs, 3), np.float32)
        self._num_counted = np.zeros(max_num_reqs, np.int64)
        """[rows] tokens of the request, prompt included, that the counts hold."""

    def asked_by(self, params: SamplingParams) -> bool:
        return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != NEUTRAL

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        params = info.sampling_params
        self._penalties[row] = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        counts = np.bincount(token_ids[info.num_prompt_tokens :], minlength=self._vocab_size)[None].astype(np.int32)
        if info.prompt_embeds is None:
            counts[0, info.prompt_token_ids] += IN_PROMPT
        to_device = self._device_ops.to_device
        self._set_row(self._counts[0], to_device(np.array([row], np.int32)), to_device(counts))
        self._num_counted[row] = len(token_ids)

    def apply(self, inputs: SampleInputs, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        batch, num_rows = inputs.batch, logits.shape[0]
        rows = batch.rows[asking]
        is_new = np.zeros(num_rows, np.int32)
        is_new[asking] = batch.seq_lens[asking] > self._num_counted[rows]
        self._num_counted[rows] = batch.seq_lens[asking]
        penalties = np.tile(np.array(NEUTRAL, np.float32), (num_rows, 1))
        penalties[asking] = self._penalties[rows]
        return self._run(logits, inputs.sample_slots, is_new, penalties)

    def _run(
        self, logits: torch.Tensor, sample_slots: torch.Tensor, is_new: np.ndarray, penalties: np.ndarray
    ) -> torch.Tensor:
        to_device = self._device_ops.to_device
        counts, last_tokens = self._counts[0], self._device_rows.tensors[0]
        return self._penalise(counts, logits, sample_slots, to_device(is_new), to_device(penalties), last_tokens)

    def warm_up(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        num_rows = logits.shape[0]
        self._run(logits, sample_slots, np.zeros(num_rows, np.int32), np.zeros((num_rows, 3), np.float32))
        row = self._device_ops.to_device(np.array([self._padding_row], np.int32))
        self._set_row(self._counts[0], row, self._device_ops.to_device(np.zeros((1, self._vocab_size), np.int32)))
