"""One call of the model in a step's graph: its tokens, what components make of the packed buffer, and its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from model_runner_base.step.batch import InputBatch
from model_runner_base.step.packing import PackedStep, Section, unpack
from model_runner_base.step.request_states import known_or
from model_runner_base.step.schedule import Schedule
from model_runner_base.step.sizes import StepSize

STARTS, LENGTHS = "decode_starts", "decode_lengths"


class DecodeRows(NamedTuple):
    """R decode rows with Q places for tokens each.

    A row has Q places for tokens at consecutive positions, and its tokens fill the first ones. Q is 1, or 1 + k where k
    drafts are verified. The host packs a row so that it is right for every position where the row may turn out to be;
    the graph reads the true position from ``DeviceRows``.
    """

    positions: torch.Tensor
    """[R, Q] int32 position of each place."""
    is_token: torch.Tensor | None = None
    """[R, Q] bool; None: every row has Q tokens, and those of padding rows do no harm."""

    @classmethod
    def of(cls, arrays: Mapping[str, torch.Tensor], computed: torch.Tensor, query: int) -> "DecodeRows":
        """Rows of a step, from its sections; ``computed`` is the ``row_computed`` of ``ModelCall``."""
        starts = known_or(arrays[STARTS], computed).unsqueeze(1)
        if query == 1:
            return cls(starts)
        index = torch.arange(query, dtype=torch.int32, device=starts.device)
        return cls(starts + index, index < arrays[LENGTHS].unsqueeze(1))


TILE_STARTS, TILE_POSITIONS, TILE_SLOTS = "chunk_tile_starts", "chunk_tile_positions", "chunk_tile_slots"


class ChunkTiles(NamedTuple):
    """NT chunk tiles with Q places for tokens each; C tokens of chunks in all."""

    tokens: torch.Tensor
    """[NT, Q] indices among the chunks' tokens; arbitrary after a tile's last token."""
    is_token: torch.Tensor
    """[NT, Q] bool: whether each place of a tile holds a token."""
    slots: torch.Tensor
    """[C] place of each token in the flattened tiles."""
    positions: torch.Tensor
    """[C] position of each token."""
    starts: torch.Tensor
    """[NT + 1] index of each tile's first token among the chunks' tokens; a tile ends where the next one begins."""
    first: torch.Tensor
    """[NT] position of each tile's first token."""
    length: torch.Tensor
    """[NT] number of tokens."""
    is_real: torch.Tensor
    """[C] bool: whether each token is real, and not padding."""
    query: int

    @classmethod
    def of(cls, arrays: Mapping[str, torch.Tensor], query: int) -> "ChunkTiles":
        """Tiles of a mixed step, from its sections."""
        starts, first, slots = arrays[TILE_STARTS], arrays[TILE_POSITIONS], arrays[TILE_SLOTS]
        num_tokens, device = slots.shape[0], slots.device
        index = torch.arange(query, dtype=torch.int32, device=device)
        length = starts[1:] - starts[:-1]
        return cls(
            tokens=(starts[:-1, None] + index).clamp(max=num_tokens - 1),
            is_token=index < length.unsqueeze(1),
            slots=slots,
            positions=first[slots // query] + slots % query,
            starts=starts,
            first=first,
            length=length,
            is_real=torch.arange(num_tokens, dtype=torch.int32, device=device) < starts[-1],
            query=query,
        )

    def request_lengths(self) -> torch.Tensor:
        """[NT] number of tokens of each tile's request, if all requests are whole in the step.

        A tile at position 0 then is the first of the next request.
        """
        tile = torch.arange(self.first.shape[0], dtype=torch.int32, device=self.first.device)
        is_next = (self.first == 0) & (tile > tile.unsqueeze(1))
        end = torch.where(is_next, self.starts[:-1], self.starts[-1]).amin(dim=1)
        return self.first + end - self.starts[:-1]


@dataclass
class ModelCall:
    """Inputs of one call of the model: ``unpack`` fills in the tokens, then the components add theirs in order.

    All tensors are on the device and padded: T tokens, L logits rows.
    """

    size: StepSize
    arrays: dict[str, torch.Tensor]
    """The sections of the packed buffer, int32."""
    row_tokens: torch.Tensor
    """[rows + 1, K] int32, the tokens of ``DeviceRows``."""
    row_computed: torch.Tensor
    """[rows + 1] int32, ``computed`` of ``DeviceRows`` as it was before the step, whatever has been sampled since."""
    token_ids: torch.Tensor
    """[T] int32 ids of the input tokens."""
    positions: torch.Tensor = field(init=False)
    """[T] int32. The layout sets this and the next four fields (step/token_layout.py)."""
    decode_rows: DecodeRows | None = None
    """Decode rows of the call; None where the layout has none in the step's own graph."""
    has_chunks: bool = False
    """Whether tokens of chunks follow the decode rows."""
    tiles: ChunkTiles | None = None
    """Tiles of the chunks, in the layout of rows and tiles."""
    token_rows: torch.Tensor = field(init=False)
    """[T] int32, in the layout of requests: the row of each token's request; the padding row for a token that
    writes no key."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Attention metadata by layer name."""
    slot_mapping: dict[str, torch.Tensor] = field(default_factory=dict)
    """[T] int64 cache slots by layer name, for layers that write the cache apart from attention."""
    tensors: Sequence[torch.Tensor] = ()
    """Tensors of the component that is being bound."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model; ``positions`` are added unless a component has set them."""

    @classmethod
    def unpack(
        cls,
        size: StepSize,
        packed: torch.Tensor,
        sections: Sequence[Section],
        row_tokens: torch.Tensor,
        row_computed: torch.Tensor,
    ) -> "ModelCall":
        arrays = unpack(packed, sections)
        token_ids = known_or(arrays["token_ids"], row_tokens.view(-1))
        token_ids = token_ids if row_tokens.shape[1] == 1 else token_ids.clamp(min=0)
        return cls(size, arrays, row_tokens, row_computed, token_ids)

    def again(self, row_computed: torch.Tensor | None = None) -> "ModelCall":
        """A copy of the call with nothing bound; ``row_computed`` [rows + 1], if given, takes the place of the call's
        own."""
        computed = self.row_computed if row_computed is None else row_computed
        return ModelCall(self.size, self.arrays, self.row_tokens, computed, self.token_ids)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that the model is called with."""
        return {"positions": self.positions, **self.kwargs}

    @property
    def sample_slots(self) -> torch.Tensor:
        """[2, L] int32: the row that each logits row is recorded in, and the position its token will have.

        Where drafts are verified [3, L]: also the draft for that position, or -1 if there is none.
        """
        rows, indices = self.arrays["sample_rows"], self.arrays["logits_indices"]
        slots = [rows, self.positions[indices] + 1]
        if self.row_tokens.shape[1] > 1:
            # A row's draft is the input token of the next logits row, if both rows are of one request.
            has_draft = (rows[1:] == rows[:-1]) & (rows[1:] != self.row_tokens.shape[0] - 1)
            token_ids = known_or(self.arrays["token_ids"], self.row_tokens.view(-1))
            drafts = torch.where(has_draft, token_ids[indices[1:]], -1)
            slots.append(torch.cat((drafts, torch.full_like(rows[:1], -1))))
        return torch.stack(slots)


class ModelResults(NamedTuple):
    """Tensors that a run of the model's graph returns, as ``Forward`` has them."""

    logits: torch.Tensor
    sample_slots: torch.Tensor
    hidden_states: torch.Tensor
    for_drafts: tuple[torch.Tensor, ...]


@dataclass
class Forward:
    """A step whose model has been launched: L padded logits rows, T padded tokens."""

    schedule: Schedule
    batch: InputBatch
    step: PackedStep
    """The packed step, as the model's graph left it."""
    logits: torch.Tensor
    """[L, V] float32; this rank's part of the rows if the vocabulary is cut. Of a pooling head: the rows [L, hidden]
    that it reads of the hidden states."""
    sample_slots: torch.Tensor
    """[2, L] or [3, L] int32, see ``ModelCall.sample_slots``."""
    hidden_states: torch.Tensor
    """[T, hidden]"""
    for_drafts: tuple[torch.Tensor, ...] = ()
    """Further tensors for drafting, as returned by ``Drafter.keep``."""
    grammar_masks: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Tokens that a grammar allows, by logits row: bitmasks in the format of ``heads/sampling/token_masks.py``."""
    results: "StepResults | None" = None
    """Results of the head, once it has launched them."""


NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
"""Fields of the output of a step of which no component reports anything."""


def joined_fields(fields: Mapping[str, Any], reported: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of both, with the ``errors`` of both; raises ValueError if both report another field."""
    if twice := [name for name in reported if name in fields and name != "errors"]:
        raise ValueError(f"two components report {twice[0]} of the step's output")
    both = {**fields, **reported}
    if "errors" in both:
        both["errors"] = fields.get("errors", {}) | reported.get("errors", {})
    return both


@dataclass(kw_only=True)
class StepResults:
    """Base of what a head makes of a forward pass: tokens, or vectors."""

    fields = NO_FIELDS
    """Fields of the step's output that components report (``StepComponent.end_step``), by name. They are there when
    the output is read, and not yet when it is made."""
