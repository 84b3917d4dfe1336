"""The head that generates: logits inside the graph; then the grammar, the stages that a batch asks for, the sampler and
log probabilities.

The order is vLLM's (``vllm/v1/sample/sampler.py``). A grammar masks the model's logits, and the result is the raw
logits. Allowed tokens, bad words, minimum length, bias, custom processors and penalties change them. Custom processors
that keep the likeliest token come after them, as do those of vLLM's second model runner. A spent thinking budget comes
last. The sampler applies temperature, min-p, top-k and top-p, and draws from the processed logits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import vllm.envs
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import supports_transcription
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.head import Head, SampledStep
from model_runner_base.heads.sampling.logits_stage import CustomProcessors, LogitsStage, OutputHistory
from model_runner_base.heads.sampling.logprobs import (
    NO_LOGPROBS,
    NONE_CHOSEN,
    PROMPTS_TAKE_MODE,
    LogprobsGatherer,
    chosen_tokens,
    count_asked,
    reads_logits,
    reads_processed,
)
from model_runner_base.heads.sampling.penalties import Penalties
from model_runner_base.heads.sampling.prompt_logprobs import PromptLogprobs
from model_runner_base.heads.sampling.sampler import SamplingMode, SamplingStates, Vocabulary, sample
from model_runner_base.heads.sampling.thinking_budget import ThinkingBudget, markers_of
from model_runner_base.heads.sampling.token_edits import TokenEdits
from model_runner_base.heads.sampling.token_masks import AllowedTokens, TokenMasks
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import Forward, ModelCall
from model_runner_base.step.graph_policy import GraphPolicy, StepFunction, WrapFunction
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.request_states import DeviceRows, RequestInfo, RequestStates
from model_runner_base.step.schedule import Arrival, Grammar


@compiled
def most_asked(
    rows: np.ndarray, is_sampled: np.ndarray, asked: np.ndarray, modes: np.ndarray, counts: np.ndarray, least: int
) -> tuple[int, int, int]:
    """Combines what the requests in ``rows`` ask for, of those that yield a token.

    Returns all bits of ``asked``, the highest of ``modes``, and the highest of ``counts``, at least ``least``.
    """
    bits, mode, count = 0, 0, least
    for index in range(len(rows)):
        if is_sampled[index]:
            row = rows[index]
            bits |= asked[row]
            mode = max(mode, modes[row])
            count = max(count, counts[row])
    return bits, mode, count


@dataclass
class SamplingPlan:
    """Sampling work that the requests of a batch ask for."""

    mode: SamplingMode
    stages: list[tuple[LogitsStage, np.ndarray]]
    """Stages, each with the indices of the requests that ask for it."""
    looking_back: np.ndarray
    """Indices of the requests whose output tokens are needed on the host."""
    num_logprobs: int
    """Largest number of likeliest tokens that a request wants, or NO_LOGPROBS."""
    chosen: Mapping[int, Sequence[int]]
    """Tokens whose log probabilities are asked for by name, by logits row."""
    sample_shards: StepFunction | None = None
    """Sampler of vocabulary shards (``sampler.py``); None if the batch needs whole logits even without a grammar."""


_NO_REQUESTS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class ModelLogits:
    """Computes logits from hidden states, with the model's head and this rank's part of the vocabulary."""

    model: Any
    vocabulary: Vocabulary

    def own(self, hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Computes this rank's part of the logits of some tokens.

        Args:
            hidden_states: [T, hidden]
            indices: the tokens, as rows of ``hidden_states``.

        Returns:
            [len(indices), V] float32, where V is the width of this rank's part.
        """
        return self.vocabulary.own(self.model.compute_logits(hidden_states[indices]).float())

    def whole(self, hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Computes whole logits rows, gathered from all ranks; takes what ``own`` takes."""
        return self.vocabulary.whole(self.own(hidden_states, indices))


class LogitsInputs(Protocol):
    """Source of what logits need in addition to hidden states. ``Adapters`` implements and documents it."""

    def logits_inputs(self, row: int | None, count: int) -> tuple[np.ndarray, ...]: ...

    def bind_logits(self, *inputs: torch.Tensor) -> None: ...

    def unbind_logits(self) -> None: ...


class LateLogits:
    """Computes logits of prompt tokens, for log probabilities of prompts, in a graph that runs after the step's."""

    def __init__(self, logits: ModelLogits, inputs: LogitsInputs, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        self._logits = logits
        self._inputs = inputs
        self._compute = wrap(self._traced, [])
        self._device_ops = device_ops

    def __call__(self, hidden_states: torch.Tensor, indices: np.ndarray, row: int | None) -> torch.Tensor:
        """Logits [len(indices), V] of tokens of the request in ``row``; if it is None, the tokens are padding."""
        arrays = indices, *self._inputs.logits_inputs(row, len(indices))
        return self._compute(hidden_states, *map(self._device_ops.to_device, arrays))

    def _traced(self, hidden_states: torch.Tensor, indices: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        self._inputs.bind_logits(*inputs)
        logits = self._logits.whole(hidden_states, indices)
        self._inputs.unbind_logits()
        return logits


class GenerateHead(Head):
    """Computes logits of a loaded ``model`` inside the graph, and samples tokens from them after it.

    ``make_sampler`` makes the sampler of a mode; the samplers record each row's token in ``rows``.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: Any,
        vocabulary: Vocabulary,
        processors: CustomProcessors,
        make_sampler: Callable[[SamplingMode], StepFunction],
        inputs: LogitsInputs,
        requests: RequestStates,
        rows: DeviceRows,
        policy: GraphPolicy,
        device_ops: DeviceOps,
    ) -> None:
        wrap, sort_limits = policy.wrap, policy.sort_limits
        model_config = vllm_config.model_config
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._vocab_size = vocab_size = model_config.get_vocab_size()
        self._logits = ModelLogits(model, vocabulary)
        self._requests = requests
        self._samplers = {mode: wrap(make_sampler(mode), rows.tensors) for mode in SamplingMode}
        self._shard_samplers = {
            mode: wrap(partial(sample, mode, False, sort_limits, vocabulary=vocabulary), rows.tensors)
            for mode in vocabulary.modes(sort_limits)
            if not vllm.envs.VLLM_COMPUTE_NANS_IN_LOGITS
        }
        self._whole = vocabulary.gatherer(wrap)
        self._rows = rows
        self._history = history = OutputHistory(device_ops)
        self._masks = TokenMasks(vocab_size, wrap, device_ops)
        custom = processors.stages(requests, history, device_ops)
        markers = markers_of(vllm_config)
        self._states = SamplingStates(max_num_reqs, vocab_size, model_config.seed, device_ops, not custom.has_min_p)
        self._stages: list[LogitsStage] = [
            AllowedTokens(self._masks),
            TokenEdits(requests, history, vocab_size, rows.num_tokens > 1, wrap, device_ops),
            *custom.before_penalties,
            Penalties(max_num_reqs, vocab_size, rows, wrap, device_ops),
            *custom.after_penalties,
            *([ThinkingBudget(markers, requests, history, wrap, device_ops)] if markers else []),
        ]
        mode = model_config.logprobs_mode
        self._reads_processed = reads_processed(mode)
        self._logprobs = LogprobsGatherer(reads_logits(mode), sort_limits.max_width, wrap, device_ops)
        # Prompts have no processed logits.
        prompt_gatherer = self._logprobs
        if reads_logits(mode) and not PROMPTS_TAKE_MODE:
            prompt_gatherer = LogprobsGatherer(False, sort_limits.max_width, wrap, device_ops)
        late_logits = LateLogits(self._logits, inputs, wrap, device_ops)
        self._prompt_logprobs = PromptLogprobs(late_logits, prompt_gatherer, max_num_reqs, vocab_size, device_ops)
        self._count_nans = wrap(_count_nans, []) if vllm.envs.VLLM_COMPUTE_NANS_IN_LOGITS else _count_nothing

        self._asked = np.zeros(max_num_reqs, np.int32)
        """[rows] bit i: the request asks for stage i; the next bit: a stage reads its output tokens on the host."""
        self._num_logprobs = np.zeros(max_num_reqs, np.int32)
        self._chosen_ids: dict[int, Sequence[int]] = {}
        """Tokens that requests choose for log probabilities, by row; a row may have been given up since."""

    # ---- Requests ----

    def info_of(self, arrival: Arrival) -> RequestInfo:
        params = arrival.params
        assert isinstance(params, SamplingParams)
        seed = self._states.draw_seed() if params.seed is None else params.seed
        return RequestInfo(params, seed, arrival.token_ids, arrival.prompt_embeds, arrival.adapter, arrival.items)

    def introduce(self, req_id: str, info: RequestInfo) -> None:
        self._prompt_logprobs.admit(req_id, info)

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        params = info.params
        self._states.admit(row, params, info.seed)
        self._num_logprobs[row] = count_asked(params, self._vocab_size)
        self._chosen_ids.pop(row, None)
        if chosen := chosen_tokens(params):
            self._chosen_ids[row] = chosen
        asked = 0
        for bit, stage in enumerate(self._stages):
            if stage.asked_by(params):
                asked |= 1 << bit
                if stage.looks_back(params):
                    asked |= 1 << len(self._stages)
        self._asked[row] = asked
        if asked >> len(self._stages):
            self._history.admit(info, token_ids)
        for bit, stage in enumerate(self._stages):
            if asked >> bit & 1:
                stage.admit(row, info, token_ids)

    def forget(self, req_id: str) -> None:
        self._prompt_logprobs.release(req_id)

    # ---- A step ----

    def traced(self, hidden_states: torch.Tensor, call: ModelCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._logits.own(hidden_states, call.arrays["logits_indices"])
        return logits, call.sample_slots, hidden_states

    def plan(self, batch: InputBatch) -> SamplingPlan:
        """Collects the stages, the sampler and the log probabilities that the batch's requests ask for.

        A repeated batch has its plan already.
        """
        if batch.plan is None:
            batch.plan = self._make_plan(batch)
        plan: SamplingPlan = batch.plan
        return plan

    def _make_plan(self, batch: InputBatch) -> SamplingPlan:
        every, highest_mode, num_logprobs = most_asked(
            batch.rows, batch.is_sampled, self._asked, self._states.modes, self._num_logprobs, NO_LOGPROBS
        )
        mode = SamplingMode(highest_mode)
        chosen = self._chosen(batch) if self._chosen_ids else NONE_CHOSEN
        if not every:
            sample_shards = self._shard_samplers.get(mode) if num_logprobs == NO_LOGPROBS else None
            return SamplingPlan(mode, [], _NO_REQUESTS, num_logprobs, chosen, sample_shards)
        asked = np.where(batch.is_sampled, self._asked[batch.rows], 0)
        return SamplingPlan(
            mode=mode,
            stages=[
                (stage, np.flatnonzero(asked >> bit & 1)) for bit, stage in enumerate(self._stages) if every >> bit & 1
            ],
            looking_back=np.flatnonzero(asked >> len(self._stages) & 1),
            num_logprobs=num_logprobs,
            chosen=chosen,
        )

    def _chosen(self, batch: InputBatch) -> dict[int, Sequence[int]]:
        """Tokens that requests choose for log probabilities, by logits row."""
        choosing = np.flatnonzero(np.isin(batch.rows, list(self._chosen_ids)) & batch.is_sampled)
        every = batch.logits_rows(choosing)
        owners = batch.rows[choosing][every.owner].tolist()
        return {index: self._chosen_ids[owner] for index, owner in zip(every.indices.tolist(), owners, strict=True)}

    def sample(self, plan: SamplingPlan, forward: Forward, grammar: Grammar | None) -> SampledStep:
        """Launches the sampling of a step. It waits only if a rule reads the tokens of earlier steps."""
        if plan.sample_shards is not None and grammar is None:
            sampled = SampledStep(self._call(plan.sample_shards, forward.logits, forward.sample_slots))
        else:
            sampled = self._sample_whole(plan, forward, self._whole(forward.logits), grammar)
        sampled.mode = plan.mode
        sampled.prompt_chunks = self._prompt_logprobs.collect(forward.batch, forward.hidden_states)
        return sampled

    def _sample_whole(
        self, plan: SamplingPlan, forward: Forward, whole: torch.Tensor, grammar: Grammar | None
    ) -> SampledStep:
        """Samples from the model's logits ``whole`` [S, V]; prompt log probabilities are left to ``sample``."""
        logits, slots = self._masks.apply_grammar(forward, whole, grammar)
        raw = logits
        for stage, asking in plan.stages:
            logits = stage.apply(forward, asking, logits)
        tokens, processed = self._draw(plan.mode, logits, slots)
        if len(plan.looking_back):
            batch, indices = forward.batch, plan.looking_back
            infos = self._requests.infos_of(batch.rows[indices])
            self._history.record(batch.logits_start(indices), batch.num_logits(indices), infos, tokens)
        sampled = SampledStep(tokens, num_nans=self._count_nans(whole))
        if plan.num_logprobs != NO_LOGPROBS:
            values = processed if self._reads_processed else raw
            sampled.logprobs = self._logprobs.gather(plan.num_logprobs, values, tokens, plan.chosen)
        return sampled

    def _draw(
        self, mode: SamplingMode, logits: torch.Tensor, sample_slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws tokens [S]; also returns the logits [S, V] that log probabilities are taken from.

        Those are the processed ones if ``logprobs_mode`` asks for them.
        """
        results = self._call(self._samplers[mode], logits, sample_slots)
        return results if self._reads_processed else (results, logits)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of ``SamplingStates``, on the device."""
        return self._states.tables()

    def _call(self, sampler: StepFunction, logits: torch.Tensor, sample_slots: torch.Tensor) -> Any:
        return sampler(logits, sample_slots, *self._states.tables(), *self._rows.tensors)

    # ---- Warm-up ----

    def warm_up_tokens(self, hidden_states: torch.Tensor) -> None:
        self._prompt_logprobs.warm_up(hidden_states)

    def warm_up_logits(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        """Runs every stage and sampler once on padding rows: logits as a step returns them, slots [2 or 3, S]."""
        for sampler in self._shard_samplers.values():
            self._call(sampler, logits, sample_slots)
        logits = self._whole(logits)
        self._masks.warm_up(logits, sample_slots)
        for stage in self._stages:
            stage.warm_up(logits, sample_slots)
        self._count_nans(logits)
        for mode in SamplingMode:
            tokens, _ = self._draw(mode, logits, sample_slots)
        self._logprobs.warm_up(logits, tokens)


def _count_nans(logits: torch.Tensor) -> torch.Tensor:
    return logits.isnan().sum(dim=-1).to(torch.int32)


def _count_nothing(logits: torch.Tensor) -> None:
    return None


def supported_generation_tasks(model: Any) -> tuple[SupportedTask, ...]:
    """Tasks that the API server offers; a model that only transcribes takes no text prompts."""
    return ("transcription",) if supports_transcription(model) and model.supports_transcription_only else ("generate",)
