"""Bidirectional spans: tokens of a chunk that see each other both ways, whatever the key range of their layers.

In some models the tokens of an image do. A token sees the keys in its layer's key range, and its whole span. Together
they are one interval, since both contain the token: from the lower first position to the higher last position. In
other models only layers with a window have spans, and the window hides a span's first keys (``in_windows``).

Example: a prompt whose tokens 4 to 7 are an image, in layers with a window of 3. Token 5 sees keys 3 to 5 by the
window, and 4 to 7 by its span: keys 3 to 7. Token 8 sees keys 6 to 8.

Slopes by distance (ALiBi) do not cover keys after a token, but no model has both.

A span's keys must be in the cache when its first token attends, so a step computes all remaining tokens of a span.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from model_runner_base.attention.plan import FAR, KeyRange
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.packing import Array, Section, pad_into

FIRST, LAST = "chunk_span_first", "chunk_span_last"
NO_LAST = -1


class SpanEnds(NamedTuple):
    """Ends of the spans of C tokens of chunks; empty where no token has a span."""

    first: np.ndarray
    """[C] int32 first position of each token's span; ``FAR`` for a token without one."""
    last: np.ndarray
    """[C] int32 last position of each token's span; ``NO_LAST`` for a token without one."""

    @classmethod
    def none(cls, num_tokens: int) -> "SpanEnds":
        """Ends for tokens without spans."""
        return cls(np.full(num_tokens, FAR, np.int32), np.full(num_tokens, NO_LAST, np.int32))


NO_ENDS = SpanEnds.none(0)


class BidirectionalSpans:
    """Interface of the spans of a model; this default has none."""

    def of_chunks(self, batch: InputBatch) -> SpanEnds:
        """Ends of the spans in the batch's chunks, chunk after chunk."""
        return NO_ENDS

    def seen(self, ends: SpanEnds, key_range: KeyRange) -> SpanEnds:
        """The part of ``ends`` that tokens see in layers with a key range."""
        return ends

    def sections(self, num_tokens: int) -> list[Section]:
        """Sections of a step with ``num_tokens`` tokens of chunks, padding included."""
        return []

    def fill(self, ends: SpanEnds, views: Mapping[str, np.ndarray]) -> None:
        """Writes to the sections what ``of_chunks`` returned."""

    def widen(
        self,
        arrays: Mapping[str, Array],
        key_range: KeyRange,
        tokens: torch.Tensor,
        first: torch.Tensor | None,
        last: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Widens the range from ``first`` (None: 0) to ``last`` by the spans of ``tokens``; returns both ends.

        ``first`` and ``last`` follow from ``key_range``.

        ``tokens`` are indices among the chunks' tokens, of any shape; ``first`` and ``last`` have the same shape.
        """
        return first, last


NO_SPANS = BidirectionalSpans()


class SentSpans(BidirectionalSpans):
    """Spans that are sent to the device, two numbers for each token of a chunk; a subclass says which they are.

    With ``in_windows``, only layers with a window have spans, in which a token sees no key before its window.
    """

    in_windows = False

    def seen(self, ends: SpanEnds, key_range: KeyRange) -> SpanEnds:
        if not self.in_windows:
            return ends
        return SpanEnds(np.full_like(ends.first, FAR), ends.last) if key_range.window else NO_ENDS

    def sections(self, num_tokens: int) -> list[Section]:
        return [Section(FIRST, (num_tokens,)), Section(LAST, (num_tokens,))]

    def fill(self, ends: SpanEnds, views: Mapping[str, np.ndarray]) -> None:
        pad_into(views[FIRST], ends.first, FAR)
        pad_into(views[LAST], ends.last, NO_LAST)

    def widen(
        self,
        arrays: Mapping[str, Array],
        key_range: KeyRange,
        tokens: torch.Tensor,
        first: torch.Tensor | None,
        last: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if self.in_windows and not key_range.window:
            return first, last
        if first is not None and not self.in_windows:
            first = torch.minimum(first, arrays[FIRST][tokens])
        return first, torch.maximum(last, arrays[LAST][tokens])
