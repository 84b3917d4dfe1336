"""Inputs of a multimodal model: embeddings of text, and encoder outputs at the items' placeholders.

Placeholders occur in prompts only, and here no token of a prompt has a decode row. So steps of pure decode need no
encoder outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from model_runner_base.inputs.multimodal.layer_inputs import DeepstackBuffers, PerLayerEmbeddings
from model_runner_base.inputs.pool import PoolRows
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import SectionUpdater, StepComponent
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.request_states import RequestInfo, RequestStates
from model_runner_base.step.sizes import StepKind, StepSize

POOL_ROWS, ROTATION = "pool_rows", "rotary_offsets"
LOOKED_UP = -1
"""Row of a text token, which has no encoder output."""


class MultiModalInputs(StepComponent):
    """Embeds the step's tokens: ``pool_rows`` is a token's row of the pool, or -1 if it is looked up by its id."""

    prompts_in_chunks = True
    reads = ("token_ids",)

    def __init__(
        self,
        requests: RequestStates,
        pool: Sequence[torch.Tensor],
        rows: PoolRows,
        levels: DeepstackBuffers,
        per_layer: PerLayerEmbeddings,
        model: Any,
    ) -> None:
        """``pool`` holds one tensor, which a graph may replace."""
        self._requests = requests
        self._pool = pool
        self._pool_rows = rows
        self._levels = levels
        self._per_layer = per_layer
        self._model = model

    def sections(self, size: StepSize) -> list[Section]:
        return [Section(POOL_ROWS, (size.num_tokens,))] if size.kind == StepKind.MIXED else []

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        if size.kind == StepKind.MIXED:
            views[POOL_ROWS][:] = LOOKED_UP
            for index in range(batch.num_decodes, len(batch.rows)):
                self._place(batch, index, views[POOL_ROWS])

    def _place(self, batch: InputBatch, index: int, rows: np.ndarray) -> None:
        """Writes the pool rows of a request's items at their tokens in this step."""
        (info,) = self._requests.infos_of(batch.rows[index : index + 1])
        begin, count = int(batch.num_computed[index]), int(batch.query_len[index])
        token = int(batch.query_start[index])
        for item in info.items:
            place = item.mm_position
            first, last = max(begin, place.offset), min(begin + count, place.offset + place.length)
            if first >= last:
                continue
            low, high = place.get_embeds_indices_in_range(first - place.offset, last - place.offset)
            if low == high:
                continue  # Only text around the item, such as its last token: it may not have been encoded.
            tokens = np.arange(first, last)
            if place.is_embed is not None:
                tokens = tokens[place.is_embed[first - place.offset : last - place.offset].numpy()]
            rows[token + tokens - begin] = self._pool_rows[item.identifier][low:high]

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        if size.kind == StepKind.MIXED:
            views[POOL_ROWS][:] = LOOKED_UP

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        return ()

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return tuple(self._pool)

    def bind(self, call: ModelCall) -> None:
        embeds, rows = self._model.get_language_model().embed_input_ids(call.token_ids), call.arrays.get(POOL_ROWS)
        if rows is not None:
            embeds, levels = gather_encoder_outputs(embeds, rows, *call.tensors)
            self._levels.bind(levels)
        self._per_layer.bind(call.token_ids, None if rows is None else rows >= 0)
        call.kwargs["input_ids"], call.kwargs["inputs_embeds"] = None, embeds

    def unbind(self) -> None:
        self._levels.unbind()
        self._per_layer.unbind()


def gather_encoder_outputs(
    looked_up: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeds a step's tokens, those with an item by their row of the pool, the others by their id. Traceable.

    Args:
        looked_up: [T, H] embeddings by id.
        rows: [T] the row of each token, negative for text.
        pool: [rows, W]

    Returns:
        Embeddings [T, H], and the further numbers of the pool's rows [T, W - H], zeros for text.
    """
    is_encoded = (rows >= 0).unsqueeze(1)
    gathered = pool[rows.clamp(min=0)].to(looked_up.dtype)
    width = looked_up.shape[1]
    return torch.where(is_encoded, gathered[:, :width], looked_up), torch.where(is_encoded, gathered[:, width:], 0)


class RotaryInputs(StepComponent):
    """Sends the rotary positions of a model that rotates each token by D of them.

    ``rotary_offsets`` are their distances from the cache position: [D, T] in a mixed step, else [T]. All tokens of a
    decode row, drafts among them, come after the prompt.
    """

    def __init__(
        self, requests: RequestStates, num_dims: int, calc_positions: Callable[[RequestInfo], tuple[np.ndarray, int]]
    ) -> None:
        self._num_dims = num_dims
        self._calc_positions = calc_positions
        self._of_prompt: list[np.ndarray] = [np.zeros((num_dims, 0), np.int32)] * requests.max_num_reqs
        self._after_prompt = np.zeros(requests.max_num_reqs, np.int32)
        """[rows] offset of all tokens after the prompt."""

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self._of_prompt[row], self._after_prompt[row] = self._calc_positions(info)

    def sections(self, size: StepSize) -> list[Section]:
        dims = (self._num_dims, size.num_tokens) if size.kind == StepKind.MIXED else (size.num_tokens,)
        return [Section(ROTATION, dims)]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        offsets, num_decodes = views[ROTATION], batch.num_decodes
        of_rows = self._after_prompt[batch.rows[:num_decodes]].repeat(batch.decode_query_len)
        offsets[..., : len(of_rows)] = of_rows
        offsets[..., len(of_rows) :] = 0
        for index in range(num_decodes, len(batch.rows)):
            row, begin, token = (int(of[index]) for of in (batch.rows, batch.num_computed, batch.query_start))
            of_chunk = offsets[:, token : token + int(batch.query_len[index])]
            of_chunk[:] = self._after_prompt[row]
            in_prompt = self._of_prompt[row][:, begin : begin + of_chunk.shape[1]]
            of_chunk[:, : in_prompt.shape[1]] = in_prompt

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        return ()

    def bind(self, call: ModelCall) -> None:
        rotated = call.positions + call.arrays[ROTATION]
        call.kwargs["positions"] = rotated if rotated.dim() == 2 else rotated.unsqueeze(0).expand(self._num_dims, -1)
