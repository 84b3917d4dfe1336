"""Presence, frequency and repetition penalties, counted on the device.

Each request row has a count of every token on the device. The last sampled token is added to it there, so nothing is
read back, and a step costs the same however long the outputs are.

Rules as in vLLM (and, for the first two, the OpenAI API): a token seen in prompt or output has its logit divided by the
repetition penalty if positive, multiplied if negative (Keskar et al., arXiv:1909.05858); then frequency penalty x count
in the output and presence penalty x (count > 0) are subtracted.
"""

from functools import partial

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.logits_stage import LogitsStage
from model_runner_base.step.call import Forward
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.request_states import DeviceRows, RequestInfo

IN_PROMPT = 1 << 23
"""Bit that marks a prompt token, in the same int32 as the output's count, which no output is long enough to reach.
Their sum stays below 2**24, because some devices add integers as float32."""

NEUTRAL = (0.0, 0.0, 1.0)


def _penalise(
    num_tokens: int,
    counts: torch.Tensor,
    logits: torch.Tensor,
    sample_slots: torch.Tensor,
    is_new: torch.Tensor,
    penalties: torch.Tensor,
    yielded: torch.Tensor,
) -> torch.Tensor:
    """Adds the tokens of each row's last step to its counts, where ``is_new``, and applies the penalties.

    Args:
        counts: [rows, V] int32, updated in place.
        logits: [S, V] float32.
        sample_slots: [2, S] or, where drafts are verified, [3, S] int32 (``ModelCall.sample_slots``).
        is_new: [S] int32, 1 if the tokens of the row's last step are not counted yet, else 0; 1 at most once a row.
        penalties: [S, 3] presence, frequency, repetition.
        yielded: [rows, ...] int32, of which the first ``num_tokens`` columns are tokens, or -1.
    """
    rows = sample_slots[0]
    tokens = yielded[rows, :num_tokens]
    is_new = is_new.unsqueeze(1) * (tokens >= 0)
    counts.index_put_((rows.unsqueeze(1).expand_as(tokens), tokens.clamp(min=0)), is_new, accumulate=True)
    count = counts[rows]
    if sample_slots.shape[0] == 3:
        count = _with_drafts(count, rows, sample_slots[2], num_tokens)
    in_output = count & (IN_PROMPT - 1)
    presence, frequency, repetition = penalties.unsqueeze(-1).unbind(1)
    repetition = torch.where(count > 0, repetition, 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - frequency * in_output - presence * (in_output > 0)


def _with_drafts(count: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The counts [S, V], with each row's drafts that come before the sampled position added."""
    index = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    for distance in range(1, num_tokens):
        # Row i has no row at i - distance if i is smaller.
        before = (index - distance).clamp(min=0)
        draft = drafts[before]
        is_before = (index >= distance) & (rows[before] == rows) & (draft >= 0)
        count = count.index_put((index, draft.clamp(min=0)), is_before.to(torch.int32), accumulate=True)
    return count


def _set_row(counts: torch.Tensor, row: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Replaces one row of the counts by ``values`` [1, V], in place; returns the row's index [1]."""
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
        self._penalise = wrap(partial(_penalise, device_rows.num_tokens), self._counts)
        self._set_row = wrap(_set_row, self._counts)
        self._device_ops = device_ops
        self._vocab_size = vocab_size
        self._penalties = np.zeros((max_num_reqs, 3), np.float32)
        self._lacks_last_step = np.zeros(max_num_reqs, np.int32)
        """[rows] 1 if the counts still lack the tokens of the request's last step."""

    def asked_by(self, params: SamplingParams) -> bool:
        return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != NEUTRAL

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        params = info.params
        self._penalties[row] = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        counts = np.bincount(token_ids[info.num_prompt_tokens :], minlength=self._vocab_size)[None].astype(np.int32)
        if info.prompt_embeds is None:
            counts[0, info.prompt_token_ids] += IN_PROMPT
        to_device = self._device_ops.to_device
        self._set_row(self._counts[0], to_device(np.array([row], np.int32)), to_device(counts))
        self._lacks_last_step[row] = 0

    def apply(self, forward: Forward, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        batch, num_logits = forward.batch, logits.shape[0]
        rows = batch.rows[asking]
        is_new = np.zeros(num_logits, np.int32)
        is_new[batch.logits_start(asking)] = self._lacks_last_step[rows]
        self._lacks_last_step[rows] = 1
        every = batch.logits_rows(asking)
        penalties = np.tile(np.array(NEUTRAL, np.float32), (num_logits, 1))
        penalties[every.indices] = self._penalties[rows[every.owner]]
        return self._run(logits, forward.sample_slots, is_new, penalties)

    def _run(
        self, logits: torch.Tensor, sample_slots: torch.Tensor, is_new: np.ndarray, penalties: np.ndarray
    ) -> torch.Tensor:
        to_device = self._device_ops.to_device
        counts, yielded = self._counts[0], self._device_rows.yielded
        return self._penalise(counts, logits, sample_slots, to_device(is_new), to_device(penalties), yielded)

    def warm_up(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        num_logits = logits.shape[0]
        self._run(logits, sample_slots, np.zeros(num_logits, np.int32), np.zeros((num_logits, 3), np.float32))
        row = self._device_ops.to_device(np.array([self._padding_row], np.int32))
        self._set_row(self._counts[0], row, self._device_ops.to_device(np.zeros((1, self._vocab_size), np.int32)))
