"""Custom logits processors, which users and plugins add: what the pipeline sees of them, and which interface they have.

They are Python code over tensors whose shapes they choose, so they run eagerly: on the device if it can do that, else
on the host, to which the logits are copied. vLLM's built-in ones are stages or parts of the sampler instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.history import OutputHistory
from model_runner_base.heads.sampling.stage import LogitsStage
from model_runner_base.step.request_states import RequestStates


@dataclass(frozen=True)
class CustomStages:
    """Stages that run custom processors; by default there are none."""

    before_penalties: Sequence[LogitsStage] = ()
    after_penalties: Sequence[LogitsStage] = ()
    has_min_p: bool = False
    """Whether a stage applies min-p, so that the sampler must not."""


class CustomProcessors(ABC):
    """Loaded custom processors of one interface of vLLM."""

    @abstractmethod
    def stages(self, requests: RequestStates, history: OutputHistory, device_ops: DeviceOps) -> CustomStages:
        """Makes the stages that run the processors; called once, when the engine starts."""
