"""Bidirectional spans: tokens of a chunk that see each other both ways, whatever the key range of their layers.

The tokens of an image do in some models. A token sees the keys that its layer's key range shows it, and its whole span:
that is one interval, from the lower of both first positions to the higher of both last ones, since both hold the token.

Example: a prompt whose tokens 4 to 7 are an image, in layers with a window of 3. Token 5 sees keys 3 to 5 by the
window, and 4 to 7 by its span: keys 3 to 7. Token 8 sees keys 6 to 8.

Slopes by distance (ALiBi) know no keys behind a token: no model has both.

A span's keys must be in the cache when its first token attends, so a step computes all that is left of a span.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from model_runner_base.attention.loops import FAR
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.packing import Array, Section, pad_into

FIRST, LAST = "chunk_span_first", "chunk_span_last"
NO_LAST = -1


class SpanEnds(NamedTuple):
    """Of C tokens of chunks, or of none where no token has a span."""

    first: np.ndarray
    """[C] int32, ``FAR`` for a token of no span."""
    last: np.ndarray
    """[C] int32, ``NO_LAST`` for a token of no span."""

    @classmethod
    def none(cls, num_tokens: int) -> "SpanEnds":
        """Of tokens without spans."""
        return cls(np.full(num_tokens, FAR, np.int32), np.full(num_tokens, NO_LAST, np.int32))


NO_ENDS = SpanEnds.none(0)


class BidirectionalSpans:
    """No token has one."""

    def of_chunks(self, batch: InputBatch) -> SpanEnds:
        """Those of the batch's chunks, one chunk's tokens behind another's."""
        return NO_ENDS

    def sections(self, num_tokens: int) -> list[Section]:
        """Of a step with so many tokens of chunks, padded."""
        return []

    def fill(self, ends: SpanEnds, views: Mapping[str, np.ndarray]) -> None:
        """Sends what ``of_chunks`` said."""

    def widen(
        self, arrays: Mapping[str, Array], tokens: torch.Tensor, first: torch.Tensor | None, last: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What ``tokens``, indices among the chunks' of any shape, see beside ``first`` (None: 0) to ``last``."""
        return first, last


NO_SPANS = BidirectionalSpans()


class SentSpans(BidirectionalSpans):
    """Two numbers a token of a chunk; which they are, a class below says."""

    def sections(self, num_tokens: int) -> list[Section]:
        return [Section(FIRST, (num_tokens,)), Section(LAST, (num_tokens,))]

    def fill(self, ends: SpanEnds, views: Mapping[str, np.ndarray]) -> None:
        pad_into(views[FIRST], ends.first, FAR)
        pad_into(views[LAST], ends.last, NO_LAST)

    def widen(
        self, arrays: Mapping[str, Array], tokens: torch.Tensor, first: torch.Tensor | None, last: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        first = None if first is None else torch.minimum(first, arrays[FIRST][tokens])
        return first, torch.maximum(last, arrays[LAST][tokens])
