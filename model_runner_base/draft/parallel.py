"""Drafting in one pass: masks come after a request's tokens, and each yields a draft (PARD, arXiv:2504.18583).

Keys of masks in the draft's cache are of no use once tokens have taken those positions. So the pass takes every token
that the step has yielded once more, in each row from the position at which the step began.

Example, with 3 drafts and mask M: row 4 began at position 130, and yielded 5, 9 of four tokens verified. A head over
hidden states takes [5, 9, M, M, -, -] at positions 130 to 135, and drafts after 9 and after both M. A draft model takes
the token at 130 too: [17, 5, 9, M, M, -, -] at 130 to 136.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from model_runner_base.draft.chain import ChainDrafter
from model_runner_base.draft.device import DraftParts, DraftRows, Shared
from model_runner_base.draft.eagle import SECTION, Eagle3Drafter
from model_runner_base.heads.sampling.sampler import SamplingMode
from model_runner_base.step.call import ModelCall
from model_runner_base.step.request_states import RequestStates, known_or
from model_runner_base.step.sizes import StepKind


class Verified(NamedTuple):
    """Results of a step for its decode rows, R of them."""

    num_yielded: torch.Tensor
    """[R] int32 number of tokens that the step yielded, at least 1."""
    yielded: torch.Tensor
    """[S] int32 tokens of the step, -1 where a token does not count."""
    features: torch.Tensor
    """[T, ...] hidden states of the target."""


class ParallelDrafter(ChainDrafter):
    """Base of drafters with one pass; a subclass runs its draft model (``run_rows``)."""

    @abstractmethod
    def run_rows(self, call: ModelCall, rows: DraftRows, step: Verified, shared: Shared) -> torch.Tensor:
        """Runs the pass; returns hidden states [R, k, hidden] for the drafts. ``call`` is the step's as it began."""

    def draft_rows(
        self, mode: SamplingMode, call: ModelCall, rows: DraftRows, shared: Shared, *step: Any
    ) -> torch.Tensor:
        num_yielded = (
            (shared.recent[rows.row, : call.row_tokens.shape[1]] >= 0).sum(dim=1, dtype=torch.int32).clamp(min=1)
        )
        hidden, token = self.run_rows(call, rows, Verified(num_yielded, *step), shared), rows.row
        if rows.row.shape[0]:
            for place in range(self.parts.num_drafts):
                token = self.put(mode, rows, place, self.parts.model.compute_logits(hidden[:, place]), shared)
        return token

    def lay_out(
        self, call: ModelCall, rows: DraftRows, num_yielded: torch.Tensor, known: torch.Tensor, num_known: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lays out rows of ``num_known`` [R] of the tokens ``known`` [R, N], then masks, and tells attention of them.

        Returns the tokens [R, N + k - 1], which of them are masks, and the positions of all tokens, chunks included.
        """
        num_masks = self.parts.num_drafts - 1
        tokens = F.pad(known, (0, num_masks))
        index = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        is_mask, num_known = index >= num_known.unsqueeze(1), num_known.unsqueeze(1)
        positions = (rows.position - num_yielded).unsqueeze(1) + index
        has_chunks = call.size.kind == StepKind.MIXED
        all_positions = self.bind_rows(call, rows, positions, has_chunks, index < num_known + num_masks)
        return torch.where(is_mask, self.parts.mask_token, tokens), is_mask, all_positions

    def states_to_draft_from(self, hidden: torch.Tensor, shape: torch.Size, num_known: torch.Tensor) -> torch.Tensor:
        """Picks the hidden states of each row's last known token and of its masks: [R, k, hidden].

        ``hidden`` begins with the states of the rows' tokens; ``shape`` is theirs, [R, N + k - 1].
        """
        index = torch.arange(self.parts.num_drafts, device=hidden.device)
        places = (num_known.unsqueeze(1) - 1 + index).unsqueeze(-1).long()
        of_rows = hidden[: shape.numel()].view(*shape, hidden.shape[-1])
        return of_rows.gather(1, places.expand(-1, -1, hidden.shape[-1]))


class ParallelDraftModel(ParallelDrafter):
    def run_rows(self, call: ModelCall, rows: DraftRows, step: Verified, shared: Shared) -> torch.Tensor:
        recent, num_places = shared.recent[rows.row], shared.tokens.shape[1]
        known = torch.cat((recent[:, num_places:], recent[:, :num_places]), dim=1).clamp(min=0)
        tokens, _, positions = self.lay_out(call, rows, step.num_yielded, known, step.num_yielded + 1)
        token_ids = tokens.view(-1)
        if call.size.kind == StepKind.MIXED:
            token_ids = torch.cat((token_ids, call.token_ids[rows.row.shape[0] * num_places :]))
        hidden = self.parts.model(
            input_ids=token_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None
        )
        return self.states_to_draft_from(hidden, tokens.shape, step.num_yielded + 1)


class ParallelEagle3(ParallelDrafter, Eagle3Drafter):
    """EAGLE-3 with all drafts in one pass; masks take a hidden state from the checkpoint."""

    def __init__(self, requests: RequestStates, parts: DraftParts) -> None:
        Eagle3Drafter.__init__(self, requests, parts)

    def run_rows(self, call: ModelCall, rows: DraftRows, step: Verified, shared: Shared) -> torch.Tensor:
        num_rows, num_places = rows.row.shape[0], shared.tokens.shape[1]
        known = shared.recent[rows.row, :num_places].clamp(min=0)
        tokens, is_mask, positions = self.lay_out(call, rows, step.num_yielded, known, step.num_yielded)
        hidden, token_ids = self.combine(step.features), tokens.view(-1)
        of_rows = hidden[: num_rows * num_places].view(num_rows, num_places, hidden.shape[-1])
        of_rows = F.pad(of_rows, (0, 0, 0, self.parts.num_drafts - 1))
        of_masks = self.combine(self.parts.model.mask_hidden)
        states = torch.where(is_mask.unsqueeze(-1), of_masks, of_rows).flatten(0, 1)
        if call.size.kind == StepKind.MIXED:
            token_ids = torch.cat((token_ids, known_or(call.arrays[SECTION], step.yielded).clamp(min=0)))
            states = torch.cat((states, hidden[num_rows * num_places :]))
        after, _ = self.run(token_ids, positions, states)
        return self.states_to_draft_from(after, tokens.shape, step.num_yielded)
