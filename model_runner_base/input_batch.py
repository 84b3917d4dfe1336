"""The input batch: what one step computes, as host arrays, and its one packed copy to the device.

Every int32 array that the step's graph reads lies in one flat buffer, section after section, so that a step costs one
host-to-device copy whatever its features are. The graph takes the buffer apart again by the same section list.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from model_runner_base.graph_policy import GraphSize

Array = TypeVar("Array", np.ndarray, torch.Tensor)


class Section(NamedTuple):
    """One array in the packed buffer."""

    name: str
    shape: tuple[int, ...]
    grows: bool = False
    """Whether its values grow by one from one step of steady decode to the next (see ``SteadyDecode``, which has to be
    told which of them are not padding); such sections come first."""


@dataclass
class InputBatch:
    """The scheduled requests of one step, unpadded: R requests, T tokens. What its tokens are goes right into the
    packed buffer.

    In steady decode one batch serves many steps: what follows its progress are views of that buffer then, int32.
    """

    req_ids: list[str]
    num_tokens: int
    rows: np.ndarray
    """[R] row of each request in the request states."""
    query_len: np.ndarray
    """[R] tokens scheduled."""
    query_start: np.ndarray
    """[R] index of each request's first token."""
    num_computed: np.ndarray
    """[R] tokens in the cache before this step."""
    seq_lens: np.ndarray
    """[R] tokens in the cache after this step."""
    is_sampled: np.ndarray
    """[R] bool: whether the request yields a token, that is, no later chunk of its prompt is left."""
    num_sampled: int
    """How many do."""
    follows: bool = False
    """Whether this is the last step's batch, every request one token further (see ``SteadyDecode``)."""

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @cached_property
    def req_id_to_index(self) -> dict[str, int]:
        return dict(zip(self.req_ids, range(self.num_reqs), strict=True))

    @cached_property
    def unsampled(self) -> list[int]:
        """Indices of the requests that yield no token."""
        return [] if self.num_sampled == self.num_reqs else np.flatnonzero(~self.is_sampled).tolist()

    @property
    def is_uniform_decode(self) -> bool:
        return self.num_tokens == self.num_reqs


def token_sections(size: GraphSize) -> list[Section]:
    """The sections that every step has, whatever its attention needs."""
    _, num_tokens, num_reqs, *_ = size
    return [
        Section("token_ids", (num_tokens,)),
        Section("token_sources", (num_tokens,)),
        Section("positions", (num_tokens,), grows=True),
        Section("logits_indices", (num_reqs,)),
        Section("sample_rows", (num_reqs,)),
        Section("sample_positions", (num_reqs,), grows=True),
    ]


def in_order(sections: Iterable[Section]) -> list[Section]:
    """The order of the packed buffer: what grows comes first."""
    every = list(sections)
    return [section for section in every if section.grows] + [section for section in every if not section.grows]


class PackedStep:
    """The host side of the packed buffer at one size."""

    def __init__(self, size: GraphSize, sections: Sequence[Section]) -> None:
        assert list(sections) == in_order(sections)
        self.size = size
        self.sections = sections
        self.buffer = np.zeros(sum(prod(section.shape) for section in sections), np.int32)
        self.views = unpack(self.buffer, sections)
        """A writable view of each section, with what the last step of this size left there."""
        self.on_device: torch.Tensor | None = None
        """The buffer's last copy there."""

    @cached_property
    def growing(self) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """The growing sections as one view, an array like it, and that as a view of each section."""
        sections = [section for section in self.sections if section.grows]
        like_them = np.empty(sum(prod(section.shape) for section in sections), np.int32)
        return self.buffer[: len(like_them)], like_them, unpack(like_them, sections)


class PackedInputs:
    """The packed buffers, made once a size."""

    def __init__(self, sections: Callable[[GraphSize], Sequence[Section]]) -> None:
        self.at = lru_cache(maxsize=256)(lambda size: PackedStep(size, sections(size)))


def unpack(packed: Array, sections: Iterable[Section]) -> dict[str, Array]:
    """Takes the packed buffer apart, on the host or on the device. Traceable, also with symbolic sizes."""
    arrays, start = {}, 0
    for section in sections:
        stop = start + prod(section.shape)
        arrays[section.name] = packed[start:stop].reshape(section.shape)
        start = stop
    return arrays


def pad_into(view: np.ndarray, values: np.ndarray, padding: int) -> None:
    """Writes ``values`` to the front of ``view`` and ``padding`` behind them."""
    view[: len(values)] = values
    view[len(values) :] = padding
