"""Generation: hidden states to logits inside the graph, then sampling."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps
from model_runner_base.graph_policy import WrapFunction
from model_runner_base.heads.sampled import SampledStep
from model_runner_base.heads.sampling.pipeline import SamplingPipeline, SamplingPlan
from model_runner_base.heads.sampling.stage import SampleInputs
from model_runner_base.heads.sampling.vocabulary import Vocabulary
from model_runner_base.requests.states import RequestInfo
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.schedule import Grammar


@dataclass(frozen=True)
class LogitsOf:
    """Logits of hidden states, by the model and the part of the vocabulary that this rank has."""

    model: Any
    vocabulary: Vocabulary

    def own(self, hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logits [len(indices), V] float32 of some rows of the hidden states [T, hidden]."""
        return self.vocabulary.own(self.model.compute_logits(hidden_states[indices]).float())

    def whole(self, hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """All of them."""
        return self.vocabulary.whole(self.own(hidden_states, indices))


class BesideLogits(Protocol):
    """Further inputs of the model's head beside hidden states (``Adapters``)."""

    def beside_logits(self, row: int | None, count: int) -> tuple[np.ndarray, ...]: ...

    def bind_logits(self, *beside: torch.Tensor) -> None: ...

    def unbind_logits(self) -> None: ...


class LogitsBehind:
    """Logits of some of a step's hidden states, by a graph of their own behind the step's."""

    def __init__(self, logits: LogitsOf, beside: BesideLogits, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        self._logits = logits
        self._beside = beside
        self._compute = wrap(self._traced, [])
        self._device_ops = device_ops

    def __call__(self, hidden_states: torch.Tensor, indices: np.ndarray, row: int | None) -> torch.Tensor:
        """[len(indices), V], of the request in ``row``; None: of padding."""
        arrays = indices, *self._beside.beside_logits(row, len(indices))
        return self._compute(hidden_states, *map(self._device_ops.to_device, arrays))

    def _traced(self, hidden_states: torch.Tensor, indices: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        self._beside.bind_logits(*beside)
        logits = self._logits.whole(hidden_states, indices)
        self._beside.unbind_logits()
        return logits


class GenerateHead:
    """What a step's hidden states become where text is generated."""

    def __init__(self, logits: LogitsOf, sampling: SamplingPipeline) -> None:
        self._logits = logits
        self.sampling = sampling

    def draw_seed(self) -> int:
        """For a request that brings none."""
        return self.sampling.draw_seed()

    def introduce(self, req_id: str, info: RequestInfo) -> None:
        """A request came for the first time."""
        self.sampling.prompt_logprobs.admit(req_id, info)

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        """A request took a row; ``token_ids`` are its prompt and its output so far."""
        self.sampling.admit(row, info, token_ids)

    def forget(self, req_id: str) -> None:
        """A request has finished."""
        self.sampling.prompt_logprobs.release(req_id)

    def traced(self, hidden_states: torch.Tensor, call: ModelCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Part of the graph: logits [L, V], or this rank's part of them; sample slots [2 or 3, L]; hidden states."""
        logits = self._logits.own(hidden_states, call.arrays["logits_indices"])
        return logits, call.sample_slots, hidden_states

    def plan(self, batch: InputBatch) -> SamplingPlan:
        """Which rules, sampler and log probabilities the batch's requests ask for."""
        return self.sampling.prepare(batch)

    def sample(self, plan: SamplingPlan, inputs: SampleInputs, grammar: Grammar | None) -> SampledStep:
        """Launches the sampler; nothing is waited for, unless a rule looks back on the last step's tokens."""
        return self.sampling.run(plan, inputs, grammar)

    def warm_up_tokens(self, hidden_states: torch.Tensor) -> None:
        """Runs once what depends on a step's number of tokens."""
        self.sampling.prompt_logprobs.warm_up(hidden_states)

    def warm_up_logits(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        """Runs once what depends on a step's rows of logits."""
        self.sampling.warm_up(logits, sample_slots)
