"""Interface of heads, which make results of a step's hidden states.

``traced`` is a part of the model's graph. After the graph the head either answers the step at once (``answer``), or
leaves the answer to ``sample_tokens``, which the engine calls next. ``GenerateHead`` (generate.py) computes logits
inside the graph, then samples; heads that pool are in ``pooling/``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from model_runner_base.heads.sampling.logprobs import DeviceLogprobs
from model_runner_base.heads.sampling.prompt_logprobs import PromptChunk
from model_runner_base.heads.sampling.sampler import SamplingMode
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import Forward, ModelCall, StepResults
from model_runner_base.step.components import StepComponent
from model_runner_base.step.request_states import RequestInfo
from model_runner_base.step.schedule import Arrival, Grammar

Value = torch.Tensor | None
"""Result of pooling for one request: a vector, a row for each of its tokens, or None while its prompt is not whole."""


@dataclass
class SampledStep(StepResults):
    """Results of sampling on the device, for S padded logits rows."""

    tokens: torch.Tensor
    """[S] int32; -1 for tokens sampled after a wrong draft, NO_TOKEN where no rule allows any token."""
    logprobs: DeviceLogprobs | None = None
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    num_nans: torch.Tensor | None = None
    """[S] int32 NaNs in each logits row, if they are counted."""
    mode: SamplingMode = SamplingMode.GREEDY
    """Mode that the tokens were drawn in."""


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

    def answer(self, forward: Forward) -> SampledStep | PooledStep | HandedOn | None:
        """Returns the step's results if they need no sampling; None leaves them to ``sample_tokens``."""
        return None

    def warm_up_tokens(self, hidden_states: torch.Tensor) -> None:  # noqa: B027
        """Runs once every function whose shapes depend on a step's number of tokens."""

    def warm_up_logits(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:  # noqa: B027
        """Runs once every function whose shapes depend on a step's number of logits rows."""
