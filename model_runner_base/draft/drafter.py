"""Drafter interface; this default drafts nothing.

Drafts are guesses. Whatever is drafted, a request's tokens are the same as without drafts
(``step/request_states.py``). A drafter may make fewer drafts, or draft for some of the requests only.
"""

from typing import Any

import torch

from model_runner_base.heads.outputs import DraftTokenIds
from model_runner_base.step.call import ModelCall, ModelResults
from model_runner_base.step.components import StepComponent
from model_runner_base.step.packing import PackedStep


class Drafter(StepComponent):
    """Drafter interface; this default drafts nothing.

    A drafter is the last component, so its sections are written after those of inputs and caches. One on the device
    drafts in ``end_step``, one on the host in ``read_output``.
    """

    # ---- A step's forward ----

    def keep(self, output: Any, call: ModelCall) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns the model's hidden states [T, hidden], and further tensors for drafting. Part of the graph."""
        return output, ()

    # ---- After the step ----

    def take(self, requests: dict[str, int]) -> DraftTokenIds | None:
        """Waits for the latest drafts of ``requests`` (rows by id) and returns them."""
        return None

    def warm_up_at(self, step: PackedStep, results: ModelResults) -> None:
        """Runs the drafter's functions on the device once at a size, whose forward pass returned ``results``."""


NO_DRAFTS = Drafter()
