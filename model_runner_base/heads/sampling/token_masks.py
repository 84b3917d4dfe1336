"""Bitmasks of the tokens that a logits row may draw from: ``allowed_token_ids`` and grammars of structured output.

Masks have xgrammar's format, which vLLM's scheduler sends: int32 words, token t at bit t % 32 of word t // 32.
"""

from collections.abc import Collection
from itertools import compress

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.logits_stage import LogitsStage
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import Forward
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.request_states import RequestInfo
from model_runner_base.step.schedule import Grammar

ALL = -1
"""Word of a mask that allows all of its 32 tokens."""

# A table instead of shifts: some devices shift negative numbers by dividing them, which rounds towards zero.
_BITS = np.array([1 << bit for bit in range(31)] + [-(1 << 31)], np.int32)


def _mask(logits: torch.Tensor, words: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Logits [S, V], -inf where the token's bit in ``words`` [S, ceil(V / 32)] is not set; ``bits`` [32]."""
    allowed = (words.unsqueeze(-1) & bits).view(words.shape[0], -1)[:, : logits.shape[1]]
    return torch.where(allowed != 0, logits, float("-inf"))


def _drop_drafts(sample_slots: torch.Tensor, has_draft: torch.Tensor) -> torch.Tensor:
    """``sample_slots`` [3, S] without the drafts where ``has_draft`` [S] int32 is 0."""
    drafts = torch.where(has_draft > 0, sample_slots[2], -1)
    return torch.cat((sample_slots[:2], drafts.unsqueeze(0)))


class TokenMasks:
    """Applies bitmasks on the device."""

    def __init__(self, vocab_size: int, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        self.num_words = -(-vocab_size // 32)
        self._function = wrap(_mask, [])
        self._drop_drafts = wrap(_drop_drafts, [])
        self._device_ops = device_ops
        self._bits = device_ops.to_device(_BITS)

    def apply(self, logits: torch.Tensor, masks: dict[int, np.ndarray]) -> torch.Tensor:
        """Masks ``logits``; ``masks`` are words by logits row, and one without a mask may draw any token."""
        words = np.full((logits.shape[0], self.num_words), ALL, np.int32)
        for index, mask in masks.items():
            words[index] = mask[: self.num_words]
        return self._function(logits, self._device_ops.to_device(words), self._bits)

    def apply_grammar(
        self, forward: Forward, logits: torch.Tensor, grammar: Grammar | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks the logits of requests with structured output; returns the logits and the sample slots.

        The scheduler masks places after a draft only if it knows the draft, and not while the model is reasoning. It
        leaves the other places free, but tokens sampled there must not count. So the draft before such a place is
        dropped, and then no token after it counts.
        """
        batch, slots = forward.batch, forward.sample_slots
        if grammar is None:
            return logits, slots
        index_of = batch.req_id_to_index
        if not all(map(index_of.__contains__, grammar.req_ids)):
            grammar = _of_batch(grammar, batch)
        every = batch.logits_rows(np.array([index_of[req_id] for req_id in grammar.req_ids], np.int64))
        bitmask = grammar.at(every.place, batch.decode_query_len)
        (after_drafts,) = every.place.nonzero()
        free = after_drafts[(bitmask[after_drafts] == ALL).all(axis=1)]
        if len(free):
            has_draft = np.ones(slots.shape[1], np.int32)
            has_draft[every.indices[free] - 1] = 0
            slots = self._drop_drafts(slots, self._device_ops.to_device(has_draft))
        forward.grammar_masks = dict(zip(every.indices.tolist(), bitmask, strict=True))
        return self.apply(logits, forward.grammar_masks), slots

    def warm_up(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        self.apply(logits, {})
        if sample_slots.shape[0] > 2:
            self._drop_drafts(sample_slots, self._device_ops.to_device(np.ones(sample_slots.shape[1], np.int32)))


def _of_batch(grammar: Grammar, batch: InputBatch) -> Grammar:
    """Drops the masks of requests that are not in the batch, because they failed and the scheduler may not know yet."""
    index_of, num_masks = batch.req_id_to_index, len(grammar.bitmask)
    is_known = np.array([req_id in index_of for req_id in grammar.req_ids])
    known = list(compress(grammar.req_ids, is_known))
    counts = np.full(len(is_known), batch.decode_query_len)
    if num_masks != counts.sum():  # Then each request has one mask for each token that it samples.
        counts[is_known] = batch.num_logits(np.array([index_of[req_id] for req_id in known], np.int64))
        counts[~is_known] = (num_masks - counts[is_known].sum()) // (~is_known).sum()
    return Grammar(known, grammar.bitmask[np.repeat(is_known, counts)])


def allows_only(mask: np.ndarray, token_ids: Collection[int], vocab_size: int) -> bool:
    """Whether a bitmask allows no token of the vocabulary except ``token_ids``."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    bits[[token for token in token_ids if 0 <= token < vocab_size]] = 0
    return not bits.any()


class AllowedTokens(LogitsStage):
    """Applies ``allowed_token_ids``."""

    def __init__(self, masks: TokenMasks) -> None:
        self._masks = masks
        self._words: dict[int, np.ndarray] = {}

    def asked_by(self, params: SamplingParams) -> bool:
        return bool(params.allowed_token_ids)

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        bits = np.zeros(32 * self._masks.num_words, np.uint8)
        bits[info.params.allowed_token_ids] = 1
        self._words[row] = np.packbits(bits, bitorder="little").view("<i4")

    def apply(self, forward: Forward, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        every = forward.batch.logits_rows(asking)
        words = [self._words[row] for row in forward.batch.rows[asking[every.owner]].tolist()]
        return self._masks.apply(logits, dict(zip(every.indices.tolist(), words, strict=True)))
