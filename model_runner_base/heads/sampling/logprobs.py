"""Log probabilities of sampled tokens, of prompt tokens, and of the likeliest tokens at the same positions.

The device finds a static number of likeliest tokens. For a request that asks for more (up to the whole vocabulary), all
values are copied to the host and sorted there. A request may choose tokens (``logprob_token_ids``), whose values the
device picks; they stand in place of the likeliest. Format and rank are vLLM's: the sampled token first, then the
likeliest in order; the rank counts the tokens that are at least as likely as the sampled one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from types import MappingProxyType

import numpy as np
import torch
from vllm.config.model import LogprobsMode
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.sampler import likeliest
from model_runner_base.step.graph_policy import WrapFunction

NUM_ON_DEVICE = 20
"""Number of likeliest tokens that are found on the device; the OpenAI API allows no more."""

NUM_CHOSEN = 128
"""Largest number of tokens that a request may choose; vLLM checks it."""

CAN_CHOOSE = "logprob_token_ids" in SamplingParams.__struct_fields__
"""Whether requests of this vLLM may choose tokens."""

_OF_PROMPTS = files("vllm") / "v1/worker/gpu/sample/prompt_logprob.py"
PROMPTS_TAKE_MODE = not _OF_PROMPTS.is_file() or "logprobs_mode" in _OF_PROMPTS.read_text()
"""Whether ``logprobs_mode`` of this vLLM also applies to prompts. Otherwise they have log probabilities in each."""

NO_LOGPROBS = -2
"""Count of a request that wants no log probabilities. (In vLLM -1 means the whole vocabulary.)"""

NONE_CHOSEN: Mapping[int, Sequence[int]] = MappingProxyType({})
"""Chosen tokens of a batch whose requests choose none."""


def resolve_count(count: int | None, vocab_size: int) -> int:
    """Number of likeliest tokens that ``logprobs`` or ``prompt_logprobs`` asks for, or NO_LOGPROBS."""
    if count is None:
        return NO_LOGPROBS
    return vocab_size if count == -1 else count


def count_asked(params: SamplingParams, vocab_size: int) -> int:
    """Number of likeliest tokens that a request asks for, or NO_LOGPROBS; 0 if it chooses tokens instead."""
    if params.logprobs is None and chosen_tokens(params):
        return 0
    return resolve_count(params.logprobs, vocab_size)


def chosen_tokens(params: SamplingParams) -> Sequence[int]:
    """Tokens that a request chooses for log probabilities; older releases of vLLM have no such parameter."""
    return getattr(params, "logprob_token_ids", None) or ()


def _values(takes_logits: bool, logits: torch.Tensor) -> torch.Tensor:
    # Cloned, because a graph that computes nothing cannot be compiled.
    return logits.clone() if takes_logits else logits.log_softmax(dim=-1)


def _top(
    takes_logits: bool, max_width: int | None, logits: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids and values [S, 1 + NUM_ON_DEVICE], and ranks [S], from logits [S, V] and chosen tokens [S]."""
    values = _values(takes_logits, logits)
    chosen = tokens.clamp(min=0).view(-1, 1)  # Where drafts are verified, -1 marks tokens that do not count.
    chosen_value = values.gather(-1, chosen.long())
    top_values, top_tokens = likeliest(values, min(NUM_ON_DEVICE, values.shape[-1]), max_width)
    ranks = (values >= chosen_value).sum(dim=-1).to(torch.int32)
    return torch.cat((chosen, top_tokens), 1), torch.cat((chosen_value, top_values), 1), ranks


def _pick(takes_logits: bool, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Values [S, NUM_CHOSEN] of the tokens [S, NUM_CHOSEN], from logits [S, V]."""
    return _values(takes_logits, logits).gather(-1, token_ids.long())


@dataclass
class DeviceLogprobs:
    """Results on the device: those of ``_top``, or the values of the whole vocabulary if more tokens are asked for."""

    count: int
    """Number of likeliest tokens asked for."""
    tokens: torch.Tensor
    top: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    full: torch.Tensor | None
    chosen: Mapping[int, Sequence[int]]
    """Tokens in place of the likeliest, by logits row."""
    picked: torch.Tensor | None
    """[S, NUM_CHOSEN] values of these tokens."""

    def begin_to_host(self, num_logits: int, device_ops: DeviceOps) -> Callable[[], LogprobsLists]:
        """Starts copying. The returned function waits for the first ``num_logits`` logits rows."""
        likeliest = self._begin_likeliest(num_logits, device_ops)
        if self.picked is None:
            return likeliest
        picked = device_ops.begin_to_host(self.picked)
        return lambda: self._with_chosen(likeliest(), picked())

    def _begin_likeliest(self, num_logits: int, device_ops: DeviceOps) -> Callable[[], LogprobsLists]:
        if self.top is not None:
            waits = [device_ops.begin_to_host(tensor) for tensor in self.top]
            return lambda: self._likeliest(*(wait()[:num_logits] for wait in waits))
        assert self.full is not None
        every, sampled = device_ops.begin_to_host(self.full), device_ops.begin_to_host(self.tokens)
        return lambda: self._sorted(every()[:num_logits], sampled()[:num_logits, None])

    def _likeliest(self, ids: np.ndarray, values: np.ndarray, ranks: np.ndarray) -> LogprobsLists:
        return LogprobsLists(ids[:, : self.count + 1], values[:, : self.count + 1], ranks)

    def _sorted(self, every: np.ndarray, sampled: np.ndarray) -> LogprobsLists:
        order = np.argsort(-every, axis=-1, kind="stable")[:, : self.count]
        value = np.take_along_axis(every, sampled, axis=-1)
        return LogprobsLists(
            np.concatenate((sampled, order), axis=1).astype(np.int32),
            np.concatenate((value, np.take_along_axis(every, order, axis=-1)), axis=1),
            (every >= value).sum(axis=-1).astype(np.int32),
        )

    def _with_chosen(self, every: LogprobsLists, picked: np.ndarray) -> LogprobsLists:
        """Puts chosen tokens in place of the likeliest; logits rows get as many columns as the longest needs."""
        extra = max(0, max(map(len, self.chosen.values())) + 1 - every.logprobs.shape[1])
        ids = np.pad(every.logprob_token_ids, ((0, 0), (0, extra)))
        values = np.pad(every.logprobs, ((0, 0), (0, extra)), constant_values=-np.inf)
        for index, token_ids in self.chosen.items():
            ids[index, 1 : len(token_ids) + 1] = token_ids
            values[index, 1 : len(token_ids) + 1] = picked[index, : len(token_ids)]
        return LogprobsLists(ids, values, every.sampled_token_ranks)


class LogprobsGatherer:
    """Makes ``DeviceLogprobs``: log probabilities, or plain logits if ``takes_logits``.

    ``max_width`` is ``SortLimits.max_width``.
    """

    def __init__(self, takes_logits: bool, max_width: int | None, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        self._top = wrap(partial(_top, takes_logits, max_width), [])
        self._full = wrap(partial(_values, takes_logits), [])
        self._pick = wrap(partial(_pick, takes_logits), [])
        self._device_ops = device_ops

    def gather(
        self,
        count: int,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        chosen: Mapping[int, Sequence[int]] = NONE_CHOSEN,
    ) -> DeviceLogprobs:
        """Launches the ``count`` likeliest tokens a logits row, for logits [S, V] float32 and sampled tokens [S] int32.

        ``chosen`` are tokens in place of the likeliest, by logits row.
        """
        picked = self._pick_chosen(logits, chosen) if chosen else None
        if count <= NUM_ON_DEVICE:
            return DeviceLogprobs(count, tokens, self._top(logits, tokens), None, chosen, picked)
        return DeviceLogprobs(count, tokens, None, self._full(logits), chosen, picked)

    def _pick_chosen(self, logits: torch.Tensor, chosen: Mapping[int, Sequence[int]]) -> torch.Tensor:
        token_ids = np.zeros((logits.shape[0], NUM_CHOSEN), np.int32)
        for index, each in chosen.items():
            token_ids[index, : len(each)] = each
        return self._pick(logits, self._device_ops.to_device(token_ids))

    def warm_up(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        for count in (0, NUM_ON_DEVICE + 1):
            self.gather(count, logits, tokens)
        if CAN_CHOOSE:
            self._pick_chosen(logits, NONE_CHOSEN)


def reads_processed(mode: LogprobsMode) -> bool:
    """Whether log probabilities are taken after the sampling parameters are applied, not from the model's logits."""
    return mode in ("processed_logprobs", "processed_logits")


def reads_logits(mode: LogprobsMode) -> bool:
    """Whether plain logits are returned instead of log probabilities."""
    return mode in ("raw_logits", "processed_logits")
