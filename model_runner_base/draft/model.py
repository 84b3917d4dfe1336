"""A smaller model of the same vocabulary as the draft.

The draft's cache already holds the drafts that were right, so the first pass takes only the last two tokens of a
request. The draft model has not yet taken the first of the two if all drafts were right, or if the request has just
finished its prompt. Otherwise its key is written once more, which changes nothing.
"""

import torch

from model_runner_base.draft.chain import ChainDrafter
from model_runner_base.draft.device import DraftRows, Shared
from model_runner_base.step.call import ModelCall
from model_runner_base.step.sizes import StepKind


class DraftModelDrafter(ChainDrafter):
    """Drafts with a smaller model. Each pass is a launch, so that graphs do not grow with the number of drafts."""

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
