"""Drafting one token after another, by a model with a KV cache of its own.

The draft model's layers share the block tables of the target's. A step's first pass brings the draft's cache up to the
tokens that the step has computed, and yields each request's first draft. Each further pass takes the draft before it.
Prompts go through the first pass only: their requests get their first drafts after their first step of decode.

Example, with 3 drafts: row 4 verified [17, 5, 9, 4] at positions 130 to 133, and yielded 5, 9, 7. Its next token is 7,
at position 133. The first pass covers the tokens that the draft's cache lacks, and yields a draft for position 134. Two
more passes take the drafts at 134 and 135, and yield those for 135 and 136. ``DeviceRows.tokens[4]`` is then 7 and the
three drafts.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from model_runner_base.caches.group import bind_rows, bind_step
from model_runner_base.draft.device import MODES, DeviceDrafter, DraftParts, DraftRows, Outcome, Shared
from model_runner_base.heads.sampling.sampler import SamplingMode
from model_runner_base.step.call import DecodeRows, ModelCall
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.sizes import StepKind, StepSize


class ChainDrafter(DeviceDrafter):
    """Base of drafters that draft in passes; a subclass calls its draft model in ``begin`` and ``follow``."""

    unrolls = True
    """Whether all passes are one graph, which suits a draft of one layer. Otherwise each pass is a launch, and the next
    one takes only its token."""

    def __init__(self, parts: DraftParts) -> None:
        super().__init__(parts)
        self._first, self._later = (
            {mode: parts.wrap(partial(function, mode), parts.state) for mode in MODES}
            for function in (self._first_passes, self._later_pass)
        )
        self._places = [parts.device_ops.to_device(np.array([place], np.int32)) for place in range(parts.num_drafts)]

    token_shift = 0
    """Number of positions by which the draft has a token earlier than the target. A head over hidden states has a token
    at the position of the state that it is paired with."""

    # ---- Passes of a kind of draft model; part of the graph ----

    def begin(
        self, call: ModelCall, rows: DraftRows, yielded: torch.Tensor, features: torch.Tensor, shared: Shared
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the first pass; returns hidden states [R, hidden] for the first draft, and tensors for the next pass.

        ``call`` is the step's as it began, with nothing bound. ``yielded`` [S] are the step's tokens, -1 where a token
        does not count. ``features`` [T, ...] are the target's hidden states.
        """
        raise NotImplementedError

    def follow(
        self, token_ids: torch.Tensor, positions: torch.Tensor, carried: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs a later pass over one token a row, [R] each; returns the same as ``begin``."""
        raise NotImplementedError

    # ---- Launching ----

    def keep(self, output: Any, call: ModelCall) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        # Sampling overwrites the rows' positions, but the first pass needs those at which the step began.
        return output, (call.row_computed.clone(),)

    def launch(self, step: PackedStep, mode: SamplingMode, outcome: Outcome) -> None:
        parts, sent = self.parts, (step.on_device, step.size)
        began, *others = outcome.for_drafts
        given = outcome.yielded, began, *(others or [outcome.features])
        token = self._first[mode](*sent, *given, *parts.tables(), *parts.rows.tensors)
        if outcome.has_decode_rows and not self.unrolls:
            for place in self._places[1:]:
                token = self._later[mode](*sent, place, token, *parts.tables(), *parts.rows.tensors)

    # ---- The graphs ----

    def _first_passes(
        self,
        mode: SamplingMode,
        packed: torch.Tensor,
        size: StepSize,
        yielded: torch.Tensor,
        began: torch.Tensor,
        features: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        call, rows, shared = self.unpack(packed, size, tensors)
        return self.draft_rows(mode, call.again(began), rows, shared, yielded, features)

    def draft_rows(
        self,
        mode: SamplingMode,
        call: ModelCall,
        rows: DraftRows,
        shared: Shared,
        yielded: torch.Tensor,
        features: torch.Tensor,
    ) -> torch.Tensor:
        """Runs all passes, or the first if they are not unrolled; takes the arguments of ``begin``.

        Returns the last drafts [R].
        """
        hidden, carried = self.begin(call, rows, yielded, features, shared)
        if not rows.row.shape[0]:
            return rows.row  # The step has only chunks, for which nothing is drafted.
        token = self.put(mode, rows, 0, self.parts.model.compute_logits(hidden), shared)
        if self.unrolls:
            for place in range(1, self.parts.num_drafts):
                hidden, carried = self._pass(call, rows, place, token, carried)
                token = self.put(mode, rows, place, self.parts.model.compute_logits(hidden), shared)
        return token

    def _later_pass(
        self,
        mode: SamplingMode,
        packed: torch.Tensor,
        size: StepSize,
        place: torch.Tensor,
        token: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Runs one further pass after ``place`` [1] drafts, the last of which is ``token`` [R]."""
        call, rows, shared = self.unpack(packed, size, tensors)
        hidden, _ = self._pass(call, rows, place, token, None)
        return self.put(mode, rows, place, self.parts.model.compute_logits(hidden), shared)

    def _pass(
        self,
        call: ModelCall,
        rows: DraftRows,
        place: int | torch.Tensor,
        token: torch.Tensor,
        carried: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the pass over the drafts ``token``, which come after ``place - 1`` others; returns as ``begin`` does."""
        positions = self.bind_rows(call, rows, (rows.position + place - self.token_shift).unsqueeze(1))
        return self.follow(token, positions, carried)

    def bind_rows(
        self,
        call: ModelCall,
        rows: DraftRows,
        positions: torch.Tensor,
        has_chunks: bool = False,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tells attention where a pass's tokens are: those of rows [R, Q], and the chunks' tokens if ``has_chunks``.

        Tokens beyond the positions that the draft model knows are drafted, too, but they write no keys.

        Args:
            counts: [R, Q] bool, False where a row has no token; None: all are tokens.

        Returns:
            The positions of all tokens [T].
        """
        last = self.parts.max_length - 1
        is_token = rows.is_real.unsqueeze(1) & (positions <= last) & (positions >= 0)
        if counts is not None:
            is_token = is_token & counts
        call = call.again()
        decode_rows = DecodeRows(positions.clamp(0, last), is_token)
        bind_rows(self.parts.layout, self.parts.caches, call, decode_rows, has_chunks)
        return self._tell(call)

    def bind_step(self, call: ModelCall) -> torch.Tensor:
        """Tells attention again where the step's own tokens are; returns their positions [T]."""
        bind_step(self.parts.layout, self.parts.caches, call)
        return self._tell(call)

    def _tell(self, call: ModelCall) -> torch.Tensor:
        context = get_forward_context()
        context.attn_metadata, context.slot_mapping = call.metadata, call.slot_mapping
        return call.positions.clamp(max=self.parts.max_length - 1)


class DraftModelDrafter(ChainDrafter):
    """Drafts with a smaller model of the same vocabulary.

    The draft's cache already holds the drafts that were right, so the first pass takes only the last two tokens of a
    request. The draft model has not yet taken the first of the two if all drafts were right, or if the request has just
    finished its prompt. Otherwise its key is written once more, which changes nothing.

    Each pass is a launch, so that graphs do not grow with the number of drafts.
    """

    unrolls = False

    def begin(
        self, call: ModelCall, rows: DraftRows, yielded: torch.Tensor, features: torch.Tensor, shared: Shared
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        recent, num_places = shared.recent[rows.row], shared.tokens.shape[1]
        num_yielded = (recent[:, :num_places] >= 0).sum(dim=1)
        # The token before the last. If the step yielded only one, it is in the last column of ``recent``.
        before = torch.where(num_yielded > 1, num_yielded - 2, num_places)
        pair = torch.stack((recent.gather(1, before.unsqueeze(1).long()).squeeze(1), shared.tokens[rows.row, 0]), dim=1)
        token_ids, has_chunks = pair.view(-1), call.size.kind == StepKind.MIXED
        if has_chunks:
            token_ids = torch.cat((token_ids, call.token_ids[rows.row.shape[0] * num_places :]))
        positions = self.bind_rows(call, rows, torch.stack((rows.position - 1, rows.position), dim=1), has_chunks)
        hidden = self._run(token_ids.clamp(min=0), positions)
        return hidden[1 : pair.numel() : 2], None

    def follow(
        self, token_ids: torch.Tensor, positions: torch.Tensor, carried: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._run(token_ids, positions), None

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.parts.model(input_ids=token_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
