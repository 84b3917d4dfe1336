"""Changes to single logits: ``bad_words``, ``min_tokens`` and ``logit_bias``.

The rules run on the host, for the requests that have them, and yield a list of (logits row, token, value) to add; -inf
forbids a token. The list goes to the device in pieces of a static length, so it may have any length and never causes a
compilation.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.logits_stage import LogitsStage, OutputHistory
from model_runner_base.heads.sampling.token_masks import allows_only
from model_runner_base.step.call import Forward
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.packing import pad_into
from model_runner_base.step.request_states import RequestInfo, RequestStates

PIECE = 512
"""Number of edits applied at a time."""

FORBIDDEN = float("-inf")


def _add(logits: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] with ``values`` [PIECE] added at ``places`` [2, PIECE] (logits row, token); places may repeat."""
    return logits.index_put((places[0], places[1]), values, accumulate=True)


class TokenEdits(LogitsStage):
    def __init__(
        self,
        requests: RequestStates,
        history: OutputHistory,
        vocab_size: int,
        has_drafts: bool,
        wrap: WrapFunction,
        device_ops: DeviceOps,
    ) -> None:
        self._requests = requests
        self._history = history
        self._vocab_size = vocab_size
        self._has_drafts = has_drafts
        """Whether drafts are verified. The number of output tokens is then known from a request's history only."""
        self._function = wrap(_add, [])
        self._device_ops = device_ops

    def asked_by(self, params: SamplingParams) -> bool:
        return bool(params.min_tokens or params.logit_bias or params.bad_words_token_ids)

    def looks_back(self, params: SamplingParams) -> bool:
        return bool(params.bad_words_token_ids or (self._has_drafts and params.min_tokens))

    def apply(self, forward: Forward, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        batch = forward.batch
        infos = self._requests.infos_of(batch.rows[asking])
        if any(self.looks_back(info.params) for info in infos):
            self._history.catch_up()
        edits: list[tuple[int, int, float]] = []
        for index, info, outputs in self._contexts(forward, asking, infos):
            found = _edits(info, outputs, forward.grammar_masks.get(index), self._vocab_size)
            # A stop token beyond the vocabulary has no logit to forbid.
            edits.extend((index, token, value) for token, value in found if 0 <= token < self._vocab_size)
        for start in range(0, len(edits), PIECE):
            logits = self._add_all(logits, edits[start : start + PIECE])
        return logits

    def _contexts(
        self, forward: Forward, asking: np.ndarray, infos: list[RequestInfo]
    ) -> Iterator[tuple[int, RequestInfo, "_Outputs"]]:
        """Yields each logits row of the asking requests, with the output tokens before the sampled one."""
        batch = forward.batch
        if not self._has_drafts:
            num_outputs = (batch.seq_lens[asking] - [info.num_prompt_tokens for info in infos]).tolist()
            for index, info, count in zip(asking.tolist(), infos, num_outputs, strict=True):
                yield index, info, _Outputs(count, info.output_token_ids)
            return
        every = batch.logits_rows(asking)
        drafts = self._device_ops.to_host(forward.sample_slots)[2].tolist()
        for index, owner, place in zip(*(values.tolist() for values in every), strict=True):
            tokens = infos[owner].output_token_ids + drafts[index - place : index]
            yield index, infos[owner], _Outputs(len(tokens), tokens)

    def _add_all(self, logits: torch.Tensor, edits: list[tuple[int, int, float]]) -> torch.Tensor:
        indices, tokens, amounts = zip(*edits, strict=True) if edits else ((), (), ())
        places, values = np.zeros((2, PIECE), np.int32), np.zeros(PIECE, np.float32)
        pad_into(places[0], np.array(indices), 0)
        pad_into(places[1], np.array(tokens), 0)
        pad_into(values, np.array(amounts), 0)
        return self._function(logits, self._device_ops.to_device(places), self._device_ops.to_device(values))

    def warm_up(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        self._add_all(logits, [])


class _Outputs(NamedTuple):
    """Output tokens of a request."""

    num_tokens: int
    tokens: list[int]
    """Output tokens; complete only if a rule of the request reads them."""


def _edits(
    info: RequestInfo, outputs: _Outputs, grammar_mask: np.ndarray | None, vocab_size: int
) -> Iterator[tuple[int, float]]:
    """Yields tokens and the values to add to their logits, for a request's token after ``outputs``.

    If a grammar allows nothing but stop tokens, ``min_tokens`` does not forbid them.
    """
    params, count = info.params, outputs.num_tokens
    for word in filter(None, params.bad_words_token_ids or ()):
        prefix = len(word) - 1
        if prefix <= count and outputs.tokens[count - prefix : count] == word[:-1]:
            yield word[-1], FORBIDDEN
    if count < params.min_tokens:
        stops = params.all_stop_token_ids
        if grammar_mask is None or not allows_only(grammar_mask, stops, vocab_size):
            for token in stops:
                yield token, FORBIDDEN
    yield from (params.logit_bias or {}).items()
