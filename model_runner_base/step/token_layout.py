"""Layout of a step's tokens, which all kinds of caches share.

A model has one layout. ``rows_and_tiles.py`` has decode rows and tiles of chunks, each padded by itself, as attention
plans read them; ``request_layout.py`` has tokens request after request, as kernels of other backends do.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from model_runner_base.step.batch import BatchOrder, InputBatch
from model_runner_base.step.call import DecodeRows, ModelCall
from model_runner_base.step.components import StepComponent
from model_runner_base.step.sizes import StepLimits, StepSize


class TokenLayout(StepComponent, ABC):
    """Component before the caches. It has a step's sizes, the order of requests, and in the graph every token's
    position."""

    order: BatchOrder
    limits: StepLimits
    reads: ClassVar[tuple[str, ...]] = ("token_ids",)

    @abstractmethod
    def needs(self, batch: InputBatch) -> list[StepSize]:
        """Sizes of this step before padding, one for each way to run it; there is at least one."""

    def chunk_start(self, size: StepSize, num_decode_tokens: int) -> int:
        """Index of the first token of chunks, after ``num_decode_tokens`` of decode rows and their padding."""
        return num_decode_tokens

    @abstractmethod
    def bind(self, call: ModelCall) -> None:
        """Sets the call's ``positions`` and the other fields that ``ModelCall`` leaves to the layout. Part of the
        graph."""

    @abstractmethod
    def bind_rows(self, call: ModelCall, rows: DecodeRows, has_chunks: bool = False) -> None:
        """Does as ``bind`` for a pass of drafting: decode rows [R, Q] of any number of tokens, at positions that the
        step may touch, followed by the step's chunks or by none."""


class DeviceStarts:
    """Upkeep of the section that says where rows start: while their step is repeated, only the device knows."""

    def __init__(self, starts: np.ndarray, rows: np.ndarray) -> None:
        self._starts = starts
        self._rows = rows

    def begin(self, positions: np.ndarray) -> None:
        self._starts[: len(self._rows)] = -self._rows - 1

    def advance(self, positions: np.ndarray) -> bool:
        return True
