"""Medusa (arXiv:2401.10774): heads that guess one token each, of successive tokens, from one state of the target."""

from functools import partial

import torch

from model_runner_base.draft.device import MODES, DeviceDrafter, DraftParts, Outcome
from model_runner_base.heads.sampling.sampler import SamplingMode
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.sizes import StepSize


class MedusaDrafter(DeviceDrafter):
    def __init__(self, parts: DraftParts) -> None:
        super().__init__(parts)
        self._functions = {mode: parts.wrap(partial(self._all_heads, mode), parts.rows.tensors) for mode in MODES}

    def launch(self, step: PackedStep, mode: SamplingMode, outcome: Outcome) -> None:
        if outcome.has_rows:
            parts = self.parts
            given = step.on_device, step.size, outcome.yielded, outcome.features
            self._functions[mode](*given, *parts.tables(), *parts.rows.tensors)

    def _all_heads(
        self,
        mode: SamplingMode,
        packed: torch.Tensor,
        size: StepSize,
        yielded: torch.Tensor,
        features: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Runs every head over the state that each row's last token was sampled from; returns the last drafts [R]."""
        _, rows, shared = self.unpack(packed, size, tensors)
        hidden = features[self.last_places(rows, yielded, shared.tokens.shape[1])]
        token = rows.row
        for place, logits in enumerate(self.parts.model.compute_logits(self.parts.model(hidden))):
            token = self.put(mode, rows, place, logits, shared)
        return token
