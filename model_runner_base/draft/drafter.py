"""What the step asks of a drafter; this one drafts nothing.

Drafts are guesses: whatever they are, a request's tokens are those that it would have without them
(``requests/device_rows.py``). A drafter may leave some out, or draft for a part of the requests.
"""

from typing import Any

import torch

from model_runner_base.heads.head import Forward
from model_runner_base.heads.sampled import SampledStep
from model_runner_base.heads.sampling.params import SamplingMode
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import StepComponent
from model_runner_base.step.packing import PackedStep
from model_runner_base.vllm_compat.types.outputs import DraftTokenIds, ModelRunnerOutput


class Drafter(StepComponent):
    """The last component, whose sections are written behind inputs and caches; this one drafts nothing."""

    # ---- A step's forward ----

    def keep(self, output: Any, call: ModelCall) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The model's hidden states [T, hidden], and what drafting needs beside. Part of the graph."""
        return output, ()

    # ---- Behind the step's sampling ----

    def draft(self, forward: Forward, sampled: SampledStep, mode: SamplingMode) -> None:
        """Launches the drafting of each request's next tokens into ``DeviceRows``; nothing is waited for."""

    def read(self, batch: InputBatch, output: ModelRunnerOutput) -> None:
        """Called with what a step yielded, where the engine reads each step before it schedules the next."""

    def take(self, requests: dict[str, int]) -> DraftTokenIds | None:
        """What was drafted last for ``requests``, rows by id; waits for it."""
        return None

    def warm_up_at(self, step: PackedStep, results: list[torch.Tensor]) -> None:
        """Runs what there is on the device once at a size, whose forward returned ``results``."""


NO_DRAFTS = Drafter()
