"""Base of drafters on the device: launches drafting after a step's sampling, and finds the rows to draft for.

The target is the model whose tokens are drafted. Drafts are drawn as the target's tokens are: with the row's own
temperature and filters, and with the noise of their position. A draft is right if, with this noise, the same token is
likeliest for both models. This holds at any temperature.
"""

from collections.abc import Callable, Mapping, MutableSequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from model_runner_base.caches.group import CacheKind
from model_runner_base.device_ops import DeviceOps
from model_runner_base.draft.drafter import Drafter
from model_runner_base.heads.head import SampledStep
from model_runner_base.heads.outputs import DraftTokenIds
from model_runner_base.heads.sampling.sampler import SamplingMode, draw
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import LENGTHS, NO_FIELDS, Forward, ModelCall, ModelResults
from model_runner_base.step.components import StepComponents
from model_runner_base.step.graph_policy import SortLimits, WrapFunction
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_states import DeviceRows
from model_runner_base.step.sizes import StepSize
from model_runner_base.step.token_layout import TokenLayout

MODES = (SamplingMode.RANDOM, SamplingMode.SORTED)
"""Modes that drafting is compiled for; greedy rows are drawn correctly in both."""


class DraftParts(NamedTuple):
    """Objects and settings that a drafter on the device works with."""

    model: Any
    layout: TokenLayout
    caches: list[CacheKind]
    components: StepComponents
    """Components of the step, which define the sections of the packed buffer."""
    rows: DeviceRows
    tables: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    """Returns the tables of ``SamplingStates`` on the device."""
    num_drafts: int
    mask_token: int
    """Token id that a parallel pass takes in place of each token to be drafted."""
    max_length: int
    """Number of positions that the draft model can take."""
    is_async: bool
    sort_limits: SortLimits
    wrap: WrapFunction
    state: MutableSequence[torch.Tensor]
    """Tensors that drafting updates: KV caches and rows."""
    forward_context: ForwardContext
    """Context of all steps, in which the draft model runs, too."""
    device_ops: DeviceOps


class DraftRows(NamedTuple):
    """Decode rows of a step after their drafts have been verified; R of them, padding included."""

    row: torch.Tensor
    """[R] int32 request row; the padding row for padding."""
    is_real: torch.Tensor
    """[R] bool, False for padding."""
    position: torch.Tensor
    """[R] int32 position of the request's last token, which no model has taken as input yet."""


class Shared(NamedTuple):
    """Tensors that every graph of a drafter takes as its last arguments."""

    floats: torch.Tensor
    ints: torch.Tensor
    """``floats`` and ``ints`` are the tables of ``SamplingStates``."""
    tokens: torch.Tensor
    computed: torch.Tensor
    recent: torch.Tensor
    """``tokens``, ``computed`` and ``recent`` are the tensors of ``DeviceRows``."""


class Outcome(NamedTuple):
    """Results of a step that drafting starts from."""

    yielded: torch.Tensor
    """[S] int32 tokens sampled, -1 where a token does not count because a draft before it was wrong."""
    features: torch.Tensor
    """[T, hidden] hidden states of the target."""
    for_drafts: tuple[torch.Tensor, ...]
    """Further tensors, as returned by ``Drafter.keep``."""
    has_decode_rows: bool
    """Whether the step has decode rows."""


class DeviceDrafter(Drafter):
    """Launches drafting after each step; a subclass makes the drafts (``launch``)."""

    def __init__(self, parts: DraftParts) -> None:
        self.parts = parts
        self._last_batch: InputBatch | None = None

    def launch(self, step: PackedStep, mode: SamplingMode, outcome: Outcome) -> None:
        """Launches the graphs that draft after a step."""
        raise NotImplementedError

    def end_step(self, forward: Forward | None) -> Mapping[str, Any]:
        """Launches drafting of each request's next tokens into ``DeviceRows``, without waiting."""
        if forward is not None:
            self._last_batch, sampled = forward.batch, forward.results
            assert isinstance(sampled, SampledStep), "a pooling model has no drafter"
            outcome = Outcome(sampled.tokens, forward.hidden_states, forward.for_drafts, forward.batch.num_decodes > 0)
            with override_forward_context(self.parts.forward_context):
                self.launch(forward.step, max(sampled.mode, SamplingMode.RANDOM), outcome)
        return NO_FIELDS

    def warm_up_at(self, step: PackedStep, results: ModelResults) -> None:
        yielded = self.parts.device_ops.to_device(np.zeros(results.sample_slots.shape[1], np.int32))
        outcome = Outcome(
            yielded, results.hidden_states, results.for_drafts, has_decode_rows=len(step.views[LENGTHS]) > 0
        )
        with override_forward_context(self.parts.forward_context):
            for mode in MODES:
                self.launch(step, mode, outcome)

    def take(self, requests: dict[str, int]) -> DraftTokenIds | None:
        last = self.parts.device_ops.to_host(self.parts.rows.tensors[0])[list(requests.values()), 1:]
        tokens = last.clip(min=0).tolist()  # -1: no drafts yet, as the request has just finished its prompt.
        batch = self._last_batch
        if not self.parts.is_async and batch is not None:
            # Nothing was drafted for chunks. Returning no drafts costs less than returning wrong ones.
            chunks = set(batch.req_ids[batch.num_decodes :])
            tokens = [[] if req_id in chunks else drafts for req_id, drafts in zip(requests, tokens, strict=True)]
        return DraftTokenIds(list(requests), tokens)

    # ---- Parts of the graphs ----

    def unpack(
        self, packed: torch.Tensor, size: StepSize, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[ModelCall, DraftRows, Shared]:
        """Takes a step's packed buffer apart, and finds its decode rows. ``tensors`` are those of ``Shared``."""
        shared = Shared(*tensors)
        call = ModelCall.unpack(size, packed, self.parts.components.sections(size), shared.tokens, shared.computed)
        is_real = call.arrays[LENGTHS] > 0
        num_rows, num_places = is_real.shape[0], shared.tokens.shape[1]
        row = call.arrays["sample_rows"][: num_rows * num_places].view(num_rows, num_places)[:, 0]
        row = torch.where(is_real, row, shared.tokens.shape[0] - 1)
        return call, DraftRows(row, is_real, shared.computed[row]), shared

    def last_places(self, rows: DraftRows, yielded: torch.Tensor, num_places: int) -> torch.Tensor:
        """Finds the input token after which each row's last token was sampled; returns its index in the step, [R]."""
        num_rows = rows.row.shape[0]
        num_yielded = (yielded[: num_rows * num_places].view(num_rows, num_places) >= 0).sum(dim=1)
        first = torch.arange(num_rows, dtype=torch.int32, device=yielded.device) * num_places
        return first + num_yielded.clamp(min=1) - 1

    def put(
        self, mode: SamplingMode, rows: DraftRows, place: int | torch.Tensor, logits: torch.Tensor, shared: Shared
    ) -> torch.Tensor:
        """Draws a draft for each row from logits [R, V], and writes it to the row after ``place`` other drafts; returns
        the drafts [R]."""
        get_forward_context().attn_metadata = None  # type: ignore[assignment]
        position = rows.position + place + 1
        tables = shared.floats, shared.ints
        token, _ = draw(mode, self.parts.sort_limits, logits.float(), rows.row, position, *tables)
        token = token.clamp(min=0)  # Padding may have NaN logits, which yield NO_TOKEN; any token serves there.
        shared.tokens.index_put_((rows.row, torch.zeros_like(rows.row) + place + 1), token)
        return token
