"""Interface of a kind of caches, which turns a batch into what the layers read.

A kind says which layers of a model it serves, and refuses what cannot be beside it in one model (``make``). It says
what tensors its layers keep outside of the KV cache (``own_tensors``). caches/factory.py has the list of kinds. A model
may have several of them side by side:

- ``caches/paged.py`` plans attention in plain torch, and serves layers that see the keys that an indexer chose;
- ``caches/compressed.py`` serves layers that compress tokens to entries;
- ``caches/decode_context.py`` serves ranks that keep a part of each request's positions;
- ``caches/contiguous.py`` reads whole lines of a contiguous cache;
- ``caches/scratch.py`` serves layers that keep nothing for a later step;
- ``caches/cross.py`` serves layers that see an encoder's output;
- ``caches/states.py`` serves recurrent layers, which keep one state of a request, or several;
- ``caches/builders.py`` hands groups to backends with metadata builders of their own, ``caches/built_states.py`` those
  of recurrent layers.

The layout, a component before the kinds, says where tokens lie (step/token_layout.py). The size that a step runs at may
depend on its plan, so the work is split. ``need`` counts on the unpadded batch. Once a size is chosen, ``fill`` writes
the padded sections on the host, for the batch that ``need`` was last called with. ``prepare`` runs when the buffer is
on the device. ``bind`` reads the buffer inside the function that becomes a graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend

from model_runner_base.attention.paged import PagedAttentionBackend, reads_plans
from model_runner_base.attention.plan import CAUSAL, KeyRange
from model_runner_base.caches.spans import BidirectionalSpans
from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import DecodeRows, ModelCall
from model_runner_base.step.components import StepComponent
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import StepLimits, StepSize
from model_runner_base.step.token_layout import PairNeed, Placed, TokenLayout
from model_runner_base.step.trace import LayerTrace


@dataclass
class AttentionGroup:
    """Layers that share a block table, a backend and a key range, and hence a plan or a metadata builder."""

    layer_names: list[str]
    block_table: BlockTable
    kv_tile: int
    """Number of positions in a KV tile of a decode row, whole blocks of the table."""
    chunk_kv_tile: int
    """Number of positions in a KV tile of a chunk, whole blocks of the table."""
    key_range: KeyRange = CAUSAL
    backend: type[AttentionBackend] = PagedAttentionBackend
    spec: Any = None
    """vLLM's KV-cache spec, which a metadata builder is made with; None for layers without a cache of their own."""
    cross_len: int = 0
    """Number of keys of an encoder's output that each token sees in cross-attention, whatever its position; else 0."""

    @property
    def reads_plans(self) -> bool:
        """Whether the base plans the layers' attention; else their backend's metadata builders do."""
        return reads_plans(self.backend)

    @property
    def reads_lines(self) -> bool:
        """Whether decode may read whole lines of a contiguous cache."""
        return getattr(self.backend, "reads_lines", False) and not self.key_range.is_whole


class ModelCaches(NamedTuple):
    """Groups, limits and devices from which the kinds of a model's caches are made."""

    groups: list[AttentionGroup]
    """Groups of all attention layers."""
    limits: StepLimits
    spans: BidirectionalSpans
    """Prompt tokens that see each other in both directions."""
    vllm_config: VllmConfig
    device_ops: DeviceOps


class OwnTensors(NamedTuple):
    """Tensors that some layers keep outside of the KV cache, and share."""

    layer_names: list[str]
    forms: list[tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of each."""


class CacheKind(StepComponent, ABC):
    """Layers of one kind: a component after the layout."""

    is_planned: ClassVar[bool] = True
    """Whether the base plans what the layers read, by rows and tiles; else metadata builders do, by requests."""
    threshold: int | None = None
    """Largest number of tokens of a request that kernels take for decode; None: they ask for no order of requests."""
    tables: Sequence[BlockTable] = ()
    """Tables of the blocks that the scheduler gives to the kind alone, after those of the KV-cache groups."""

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        """Makes the kind for the layers of ``model`` that it serves; None if there are none.

        Raises UnsupportedConfigError for layers that cannot be in one model with the others. The default is for a kind
        that a device makes itself.
        """
        return None

    @classmethod
    def own_tensors(cls, vllm_config: VllmConfig, kv_tile_target: int) -> list[OwnTensors]:
        """Tensors of the kind's layers that are no part of the KV cache; none by default. ``kv_tile_target`` is
        ``ModelRunnerBase.KV_TILE``."""
        return []

    def need(self, placed: Placed) -> PairNeed:
        """Number of pairs in the kind's plans for a batch, before padding; none by default."""
        return PairNeed()

    def other_sizes(self, batch: InputBatch) -> list[StepSize]:
        """Other sizes that the step may run at, before padding; none by default."""
        return []

    @abstractmethod
    def bind(self, call: ModelCall) -> None:
        """Adds what the layers read to the call's ``metadata`` and ``slot_mapping``; called after the layout's
        ``bind``.

        Part of the graph.
        """

    def bind_rows(self, call: ModelCall) -> None:
        """Does as ``bind`` for a pass of drafting; called after the layout's ``bind_rows``."""
        self.bind(call)

    @abstractmethod
    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        """Traces of what ``bind`` makes, by layer; the call is on the host, and the layout's ``bind`` has run."""


def bind_rows(
    layout: TokenLayout, kinds: Sequence[CacheKind], call: ModelCall, rows: DecodeRows, has_chunks: bool
) -> None:
    """Binds the layout and all kinds for a pass over ``rows``."""
    layout.bind_rows(call, rows, has_chunks)
    for kind in kinds:
        kind.bind_rows(call)


def bind_step(layout: TokenLayout, kinds: Sequence[CacheKind], call: ModelCall) -> None:
    """Binds the layout and all kinds for the step's own tokens again, for a pass of drafting over them."""
    layout.bind(call)
    for kind in kinds:
        kind.bind(call)
