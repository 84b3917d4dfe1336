"""Layout of a step's tokens, for every kind of caches alike.

A model has one layout. ``rows_and_tiles.py`` has decode rows and tiles of chunks, each padded by itself, as attention
plans read them; ``request_layout.py`` has one request's tokens behind another's, as kernels of other backends do.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from model_runner_base.step.batch import InputBatch
from model_runner_base.step.builder import BatchOrder
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import StepComponent
from model_runner_base.step.decode_rows import DecodeRows
from model_runner_base.step.sizes import StepLimits, StepSize


class TokenLayout(StepComponent, ABC):
    """A component before the caches: sizes, the order of requests, and in the graph the position of every token."""

    order: BatchOrder
    limits: StepLimits
    reads: ClassVar[tuple[str, ...]] = ("token_ids",)

    @abstractmethod
    def needs(self, batch: InputBatch) -> list[StepSize]:
        """Sizes of this step before padding, one for each way to run it: one, or more to choose from."""

    def chunk_start(self, size: StepSize, num_decode_tokens: int) -> int:
        """The index of the first token of chunks, behind ``num_decode_tokens`` of decode rows and their padding."""
        return num_decode_tokens

    @abstractmethod
    def bind(self, call: ModelCall) -> None:
        """Sets the call's ``positions`` and what else ``ModelCall`` says of places. Part of the graph."""

    @abstractmethod
    def bind_rows(self, call: ModelCall, rows: DecodeRows, has_chunks: bool = False) -> None:
        """Does as ``bind``, for decode rows [R, Q] of any number of tokens, at positions that the step may touch, and
        behind them the step's chunks or none. A pass of drafting is such."""


class DeviceStarts:
    """Upkeep of a section of where rows start: while their step is repeated, the device knows."""

    def __init__(self, starts: np.ndarray, rows: np.ndarray) -> None:
        self._starts = starts
        self._rows = rows

    def begin(self, positions: np.ndarray) -> None:
        self._starts[: len(self._rows)] = -self._rows - 1

    def follow(self, positions: np.ndarray) -> bool:
        return True
