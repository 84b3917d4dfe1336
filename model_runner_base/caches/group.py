"""What the step asks of a kind of KV-cache groups: from a batch to what the attention layers read.

A group's kind is chosen once, from what its layers keep and read (caches/kinds.py); ``caches/paged.py`` plans attention
in plain torch, ``caches/lines.py`` reads whole lines of a contiguous cache, ``caches/scratch.py`` serves layers that
keep nothing for a later step, ``caches/cross.py`` layers that see an encoder's output, ``caches/builders.py`` hands
groups to backends with kernels and metadata builders of their own.

Work comes in halves, since the size a step runs at may depend on its plan: ``needs`` counts on the unpadded batch; once
a size is chosen, ``fill`` writes the padded sections on the host, of the batch that ``needs`` was last asked about;
``prepare`` runs when the buffer is on the device; ``bind`` works from it, inside the function that becomes a graph.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.attention.backend import AttentionBackend

from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.attention.sight import CAUSAL, Sight
from model_runner_base.attention.trace import LayerTrace
from model_runner_base.caches.decode_rows import DecodeRows
from model_runner_base.requests.block_tables import BlockTable
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.builder import BatchOrder
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import StepComponent
from model_runner_base.step.packing import Section
from model_runner_base.step.sizes import Dim, StepLimits, StepSize


@dataclass
class AttentionGroup:
    """Layers that share a block table, a backend and what they see, hence a plan or a metadata builder."""

    layer_names: list[str]
    block_table: BlockTable
    kv_tile: int
    """Positions in a KV tile of a decode row, whole blocks of the table."""
    chunk_kv_tile: int
    """Those of a chunk's."""
    sight: Sight = CAUSAL
    backend: type[AttentionBackend] = PagedAttentionBackend
    spec: Any = None
    """vLLM's KV-cache spec, which a metadata builder is made with; None for layers without a cache of their own."""
    cross_len: int = 0
    """Of cross-attention: how many keys of its encoder's output each token sees, in whatever place; else 0."""

    @property
    def reads_lines(self) -> bool:
        """Whether decode may read whole lines of a contiguous cache."""
        return getattr(self.backend, "reads_lines", False) and not self.sight.is_whole


class CacheKind(StepComponent, ABC):
    """All groups of one kind."""

    dims: tuple[Dim, ...] = ()
    """What this kind adds to the size of a step."""
    order = BatchOrder()
    limits: StepLimits
    reads = ("token_ids",)

    @abstractmethod
    def needs(self, batch: InputBatch) -> list[StepSize]:
        """The size of this step before padding, for each way it can be run: one, or more to choose from."""

    @abstractmethod
    def sections(self, size: StepSize) -> list[Section]: ...

    @abstractmethod
    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None: ...

    def chunk_start(self, size: StepSize, num_decode_tokens: int) -> int:
        """The index of the first token of chunks, behind ``num_decode_tokens`` of decode rows and their padding."""
        return num_decode_tokens

    @abstractmethod
    def bind(self, call: ModelCall) -> None:
        """Sets the call's ``positions``, and adds what the layers read to its ``metadata`` and ``slot_mapping``.

        Part of the graph.
        """

    def bind_rows(self, call: ModelCall, rows: DecodeRows, has_chunks: bool = False) -> None:
        """As ``bind``, for decode rows [R, Q] of any number of tokens, at positions that the step may touch, and behind
        them the step's chunks or none. What drafts runs its passes so."""
        raise NotImplementedError

    @abstractmethod
    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        """What ``bind`` tells each layer, by name; the call is on the host, and its positions are set."""


class DeviceStarts:
    """A section of where rows start, while their step is repeated: the device knows."""

    def __init__(self, starts: np.ndarray, rows: np.ndarray) -> None:
        self._starts = starts
        self._rows = rows

    def begin(self, positions: np.ndarray) -> None:
        self._starts[: len(self._rows)] = -self._rows - 1

    def follow(self, positions: np.ndarray) -> bool:
        return True
