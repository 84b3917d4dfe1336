"""What the step asks of an attention adapter: from an input batch to what the attention layers read.

It works in halves, since the size a step runs at may depend on its plan: ``plan`` on the unpadded batch; once the graph
policy has chosen the size, ``pack`` into the padded buffer on the host; ``prepare`` when the buffer is on the device;
``build`` from it, inside the function that becomes a graph. ``attention_metadata.py`` plans attention in plain torch,
``attention/builders.py`` hands it to a backend with kernels and a metadata builder of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.attention.plan import PlanGeometry
from model_runner_base.block_tables import BlockTable
from model_runner_base.graph_policy import GraphSize
from model_runner_base.input_batch import InputBatch, PackedStep, Section


@dataclass
class AttentionGroup:
    """Layers that share a block table, a backend and a sliding window, hence a plan or a metadata builder."""

    layer_names: list[str]
    block_table: BlockTable
    geometry: PlanGeometry
    backend: type[AttentionBackend] = PagedAttentionBackend
    spec: KVCacheSpec | None = None
    """What a metadata builder is made with."""


class SteadySections(Protocol):
    """Sections of the adapter's in steady decode (see ``SteadyDecode``)."""

    def begin(self, increments: dict[str, np.ndarray]) -> None:
        """Marks what of them grows, if anything does, in ``increments``, views by name."""

    def advance(self) -> bool:
        """Follows the positions by a token a request; False if there is no room for it."""


class AttentionAdapter(ABC):
    """Plans and metadata for every attention group of the model."""

    decode_threshold: int | None = None
    """If set, every batch is in the order that vLLM's backends expect (``reorder_batch_to_split_decodes_and_prefills``
    in vllm/v1/attention/backends/utils.py): requests that have tokens in the cache, those with at most so many new ones
    first; then requests that have none."""

    @abstractmethod
    def plan(self, batch: InputBatch) -> list[Any]:
        """What is known of the step before padding, a group each."""

    @abstractmethod
    def needed_sizes(self, batch: InputBatch, plans: list[Any]) -> list[GraphSize]:
        """The size of this step before padding, for each way it can be run: one, or more to choose from."""

    @abstractmethod
    def sections(self, size: GraphSize) -> list[Section]:
        """This adapter's part of the packed buffer."""

    @abstractmethod
    def pack(self, batch: InputBatch, plans: list[Any], size: GraphSize, views: dict[str, np.ndarray]) -> None:
        """Fills this adapter's sections."""

    @abstractmethod
    def pack_padding(self, views: dict[str, np.ndarray]) -> None:
        """What of these sections is not zero in a step of nothing but padding."""

    @abstractmethod
    def steady_plans(
        self, batch: InputBatch, plans: list[Any], size: GraphSize, views: dict[str, np.ndarray]
    ) -> Sequence[SteadySections] | None:
        """What keeps the packed ``plans`` of a step of pure decode up while it is repeated.

        None has every step built from scratch.
        """

    @abstractmethod
    def build(self, size: GraphSize, arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Metadata by layer name, from a step's unpacked sections on the device, the runner's own (``token_sections``)
        among them; part of the graph."""

    def prepare(self, batch: InputBatch | None, packed: PackedStep) -> None:  # noqa: B027
        """Called before every run, when ``packed`` is on the device; not part of the graph. No batch: all padding."""

    def slot_mapping(self, size: GraphSize) -> dict[str, torch.Tensor]:
        """[T] int64 cache slots by layer name, for layers that write the cache apart from attention; after ``build``.

        Part of the graph.
        """
        return {}
