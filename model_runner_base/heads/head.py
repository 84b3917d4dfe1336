"""Heads: a step's hidden states to results, and the head that generates text.

``traced`` is a part of the model's graph. After the graph the head either answers the step at once (``answer``), or
leaves the answer to ``sample_tokens``, which the engine calls next. ``GenerateHead`` computes logits inside the graph,
then samples; heads that pool are in ``pooling/``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import supports_transcription
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.logits_stage import CustomProcessors
from model_runner_base.heads.sampling.pipeline import SampledStep, SamplingPipeline, SamplingPlan
from model_runner_base.heads.sampling.sampler import SamplingMode, Vocabulary
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import Forward, ModelCall, StepResults
from model_runner_base.step.components import StepComponent
from model_runner_base.step.graph_policy import GraphPolicy, StepFunction, WrapFunction
from model_runner_base.step.request_states import DeviceRows, RequestInfo, RequestStates
from model_runner_base.step.schedule import Arrival, Grammar

Value = torch.Tensor | None
"""Result of pooling for one request: a vector, a row for each of its tokens, or None while its prompt is not whole."""


@dataclass
class PooledStep(StepResults):
    """Results of a step that a pooling head has answered."""

    finish: Callable[[], tuple[Sequence[Value], dict[str, str | None]]]
    """Waits for the step and pools; returns the value of each request of the batch, and the reasons of those that
    failed, by request."""


@dataclass
class HandedOn(StepResults):
    """Results of a step on a stage that is not the last of its pipeline: none that the engine reads."""


class Head(ABC):
    """Head interface. Methods that are not abstract do nothing by default."""

    answers_at_once: ClassVar[bool] = False
    """Whether ``answer`` answers every step, so that the engine never asks for ``sample_tokens``."""

    def components(self) -> Sequence[StepComponent]:
        """Components of the step that the head brings; they come after the token ids and before the layout."""
        return ()

    @abstractmethod
    def info_of(self, arrival: Arrival) -> RequestInfo:
        """Makes the lasting state of a request that comes for the first time, or of a session's next turn."""

    def introduce(self, req_id: str, info: RequestInfo) -> None:  # noqa: B027
        """Called when a request comes for the first time."""

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:  # noqa: B027
        """Called when a request takes a row; ``token_ids`` are its prompt and its output so far."""

    def forget(self, req_id: str) -> None:  # noqa: B027
        """Called when a request has finished."""

    @abstractmethod
    def traced(self, hidden_states: torch.Tensor, call: ModelCall) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of ``Forward`` from ``logits`` to ``hidden_states``. Part of the graph."""

    def plan(self, batch: InputBatch) -> Any:
        """Plans the work of ``sample`` for the batch; None for a head that answers every step at once."""
        return None

    def sample(self, plan: Any, forward: Forward, grammar: Grammar | None) -> SampledStep | HandedOn:
        """Launches the work of ``sample_tokens``; called only if ``answer`` returned None."""
        raise NotImplementedError

    def answer(self, forward: Forward) -> SampledStep | PooledStep | None:
        """Returns the step's results if they need no sampling; None leaves them to ``sample_tokens``."""
        return None

    def warm_up_tokens(self, hidden_states: torch.Tensor) -> None:  # noqa: B027
        """Runs once every function whose shapes depend on a step's number of tokens."""

    def warm_up_logits(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:  # noqa: B027
        """Runs once every function whose shapes depend on a step's number of logits rows."""


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
    """Computes logits inside the graph, and samples tokens from them after it."""

    def __init__(self, logits: ModelLogits, sampling: SamplingPipeline) -> None:
        self._logits = logits
        self.sampling = sampling

    def info_of(self, arrival: Arrival) -> RequestInfo:
        params = arrival.params
        assert isinstance(params, SamplingParams)
        seed = self.sampling.draw_seed() if params.seed is None else params.seed
        return RequestInfo(params, seed, arrival.token_ids, arrival.prompt_embeds, arrival.adapter, arrival.items)

    def introduce(self, req_id: str, info: RequestInfo) -> None:
        self.sampling.prompt_logprobs.admit(req_id, info)

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self.sampling.admit(row, info, token_ids)

    def forget(self, req_id: str) -> None:
        self.sampling.prompt_logprobs.release(req_id)

    def traced(self, hidden_states: torch.Tensor, call: ModelCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._logits.own(hidden_states, call.arrays["logits_indices"])
        return logits, call.sample_slots, hidden_states

    def plan(self, batch: InputBatch) -> SamplingPlan:
        """Collects the stages, the sampler and the log probabilities that the batch's requests ask for."""
        return self.sampling.prepare(batch)

    def sample(self, plan: SamplingPlan, forward: Forward, grammar: Grammar | None) -> SampledStep:
        """Launches the sampler. It waits for earlier steps only if a stage reads their tokens."""
        return self.sampling.run(plan, forward, grammar)

    def warm_up_tokens(self, hidden_states: torch.Tensor) -> None:
        self.sampling.prompt_logprobs.warm_up(hidden_states)

    def warm_up_logits(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        self.sampling.warm_up(logits, sample_slots)


def make_generate_head(
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
) -> GenerateHead:
    """Makes the head of a loaded ``model``, with a sampler for each mode; the samplers record tokens in ``rows``."""
    wrap, logits = policy.wrap, ModelLogits(model, vocabulary)
    sampling = SamplingPipeline(
        vllm_config,
        processors,
        requests,
        {mode: wrap(make_sampler(mode), rows.tensors) for mode in SamplingMode},
        LateLogits(logits, inputs, wrap, device_ops),
        rows,
        wrap,
        policy.sort_limits,
        vocabulary,
        device_ops,
    )
    return GenerateHead(logits, sampling)


def supported_generation_tasks(model: Any) -> tuple[SupportedTask, ...]:
    """Tasks that the API server offers; a model that only transcribes takes no text prompts."""
    return ("transcription",) if supports_transcription(model) and model.supports_transcription_only else ("generate",)
