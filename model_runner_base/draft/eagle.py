"""Heads over the target's own hidden states: EAGLE, EAGLE-3, the layers of multi-token prediction, and Medusa.

For each token, a head takes the token after it and the target's hidden state of the token itself. It yields a guess of
the next hidden state, from which the next token is drawn. In the next pass that guess takes the place of the target's
state (EAGLE, arXiv:2401.15077). EAGLE-3 reads the states of three of the target's layers (arXiv:2503.01840). Medusa
has a head for each place, and no further pass (arXiv:2401.10774).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from model_runner_base.draft.chain import ChainDrafter
from model_runner_base.draft.device import MODES, DeviceDrafter, DraftParts, DraftRows, Outcome, Shared
from model_runner_base.heads.sampling.sampler import SamplingMode
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import SectionUpdater
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.request_states import RequestStates, known_or
from model_runner_base.step.sizes import StepKind, StepSize

SECTION = "next_token_ids"


class EagleDrafter(ChainDrafter):
    """Drafts with a head over hidden states. All passes are one graph.

    The first pass covers the step's own tokens; at each position it takes the next token.
    """

    token_shift = 1

    def __init__(self, requests: RequestStates, parts: DraftParts) -> None:
        super().__init__(parts)
        self._requests = requests
        self._chunk_tokens = [dim.name for dim in parts.layout.limits.dims].index("chunk_tokens")
        """Index of the number of chunk tokens in a size's ``dims``."""

    def sections(self, size: StepSize) -> list[Section]:
        if size.kind != StepKind.MIXED:
            return []
        return [Section(SECTION, (size.dims[self._chunk_tokens],))]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        if size.kind == StepKind.MIXED:
            rows, requests = batch.num_decodes, self._requests
            chunks = batch.rows[rows:], batch.num_computed[rows:], batch.query_len[rows:]
            fill_next(*chunks, batch.num_decode_tokens, requests.num_known, requests.token_ids, views[SECTION])

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        return ()

    def begin(
        self, call: ModelCall, rows: DraftRows, yielded: torch.Tensor, features: torch.Tensor, shared: Shared
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_places = call.row_tokens.shape[1]
        token_ids = yielded[: rows.row.shape[0] * num_places]
        if call.size.kind == StepKind.MIXED:
            token_ids = torch.cat((token_ids, known_or(call.arrays[SECTION], yielded)))
        positions = self.bind_step(call)
        hidden, carried = self.run(token_ids.clamp(min=0), positions, self.combine(features))
        last = self.last_places(rows, yielded, num_places)
        return hidden[last], carried[last]

    def follow(
        self, token_ids: torch.Tensor, positions: torch.Tensor, carried: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert carried is not None
        return self.run(token_ids, positions, carried)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Makes the hidden states [T, hidden] that the head takes from the target's; here they are the same."""
        return features

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the head; returns hidden states for the logits, and hidden states for the next pass."""
        return self.parts.model(input_ids=token_ids, positions=positions, hidden_states=hidden_states)


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3: the target returns the states of some of its layers, besides its last hidden states."""

    def keep(self, output: Any, call: ModelCall) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        if isinstance(output, torch.Tensor):  # The head was trained on the last hidden states alone.
            return super().keep(output, call)
        hidden_states, of_layers = output
        return hidden_states, (call.row_computed.clone(), torch.cat(of_layers, dim=-1))

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        return self.parts.model.combine_hidden_states(features)


class MtpDrafter(EagleDrafter):
    """Multi-token prediction. Of several such layers, the first one is run in every pass, as vLLM does."""

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.parts.model(input_ids=token_ids, positions=positions, hidden_states=hidden_states)
        # Some layers return both, and give the next pass the hidden states after their norm.
        return (hidden, hidden) if isinstance(hidden, torch.Tensor) else hidden


@compiled
def fill_next(
    rows: np.ndarray,
    num_computed: np.ndarray,
    query_len: np.ndarray,
    first_logits: int,
    num_known: np.ndarray,
    known: np.ndarray,
    next_ids: np.ndarray,
) -> None:
    """Writes to ``next_ids`` the token after each of the chunks' tokens.

    A token that is sampled in this step, in row L of its logits, is written as ``-(L + 1)``. Each chunk has one row of
    logits, from ``first_logits`` on.
    """
    token = 0
    for chunk in range(len(rows)):
        row, position = rows[chunk], num_computed[chunk]
        for _ in range(query_len[chunk]):
            position += 1
            next_ids[token] = known[row, position] if position < num_known[row] else -(first_logits + chunk) - 1
            token += 1
    next_ids[token:] = 0


class MedusaDrafter(DeviceDrafter):
    """Medusa: heads that guess one token each, of successive tokens, from one state of the target."""

    def __init__(self, parts: DraftParts) -> None:
        super().__init__(parts)
        self._functions = {mode: parts.wrap(partial(self._all_heads, mode), parts.rows.tensors) for mode in MODES}

    def launch(self, step: PackedStep, mode: SamplingMode, outcome: Outcome) -> None:
        if outcome.has_decode_rows:
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
