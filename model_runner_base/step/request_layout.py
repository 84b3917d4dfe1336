"""Layout of tokens request after request, which kernels with metadata builders of their own read.

A step sends each request's row, where it starts, and how many tokens it has; positions are worked out on the device.

Where drafts are verified, each decode row takes up 1 + k tokens, because kernels take decode to be uniform. The places
of missing drafts write no key, and come after all tokens that count, so no result depends on them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from model_runner_base.step.batch import BatchOrder, InputBatch
from model_runner_base.step.call import LENGTHS, DecodeRows, ModelCall
from model_runner_base.step.components import SectionUpdater
from model_runner_base.step.packing import PackedStep, Section, pad_into
from model_runner_base.step.request_states import known_or
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize
from model_runner_base.step.token_layout import DeviceStarts, TokenLayout

STARTS, QUERY_START = "starts", "query_start_loc"


class RequestLayout(TokenLayout):
    """Layout of steps without attention plans.

    ``threshold`` is the most tokens of a request that kernels take for decode; None if they ask for no order.
    """

    reads = ("token_ids", "rows")

    def __init__(self, limits: StepLimits, threshold: int | None) -> None:
        self.limits = limits
        self._query = limits.decode.query
        self.order = BatchOrder(threshold or 1, fresh_last=threshold is not None, decode_query_len=self._query)

    # ---- On the host ----

    def needs(self, batch: InputBatch) -> list[StepSize]:
        """Counts tokens and requests only: kernels cut the work into tiles themselves."""
        rows, reqs, num_tokens = batch.num_decodes, batch.num_reqs, batch.num_places
        kind = StepKind.DECODE if batch.is_decode and num_tokens == reqs * self._query else StepKind.MIXED
        dims = {
            "tokens": num_tokens,
            "requests": reqs,
            "logits": batch.num_decode_tokens + reqs - rows,
            "decode_rows": rows,
            "chunk_tokens": num_tokens - batch.num_decode_tokens,
        }
        return [self.limits.size(kind, **dims)]

    def _num_rows(self, size: StepSize) -> int:
        """Number of decode rows of a size; 0 where rows have one token each, since it is not needed then."""
        return 0 if self._query == 1 else self.limits.named(size)["decode_rows"]

    def sections(self, size: StepSize) -> list[Section]:
        sections = [Section(STARTS, (size.num_reqs,)), Section(QUERY_START, (size.num_reqs + 1,))]
        if self._query > 1:
            sections.append(Section(LENGTHS, (self._num_rows(size),)))
        return sections

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Fills the sections; padding requests have no tokens and an empty row."""
        pad_into(views[QUERY_START], batch.query_start, batch.num_places)
        # If only the device knows a request's next token, only the device knows its position.
        is_on_device = views["token_ids"][batch.query_start] < 0
        pad_into(views[STARTS], np.where(is_on_device, -batch.rows - 1, batch.num_computed), 0)
        if self._query > 1:
            pad_into(views[LENGTHS], batch.query_len[: batch.num_decodes], 0)

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Fills in requests that share the tokens evenly, none longer than the model allows, with nothing in the
        cache."""
        num_rows, query_start_loc = self._num_rows(size), views[QUERY_START]
        in_rows = num_rows * self._query
        query_start_loc[:num_rows] = np.arange(num_rows) * self._query
        chunks = np.arange(size.num_reqs - num_rows + 1)
        even = chunks * (size.num_tokens - in_rows) // max(1, size.num_reqs - num_rows)
        query_start_loc[num_rows:] = in_rows + np.minimum(even, chunks * self.limits.max_model_len)

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        return [DeviceStarts(step.views[STARTS], batch.rows)]

    # ---- On the device ----

    def bind(self, call: ModelCall) -> None:
        call.token_rows, call.positions = self._places(call)

    def bind_rows(self, call: ModelCall, rows: DecodeRows, has_chunks: bool = False) -> None:
        call.decode_rows, call.has_chunks = rows, has_chunks
        num_rows, query = rows.positions.shape
        token_rows = call.arrays["rows"][:num_rows].unsqueeze(1).expand(-1, query)
        if rows.is_token is not None:
            token_rows = token_rows.masked_fill(~rows.is_token, self.limits.max_num_reqs)
        places = token_rows.reshape(-1), rows.positions.reshape(-1)
        if has_chunks:
            chunks = (of_step[num_rows * self._query :] for of_step in self._places(call))
            places = tuple(torch.cat(each) for each in zip(places, chunks, strict=True))  # type: ignore[assignment]
        call.token_rows, call.positions = places

    def _places(self, call: ModelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] int32 the row of each token's request, and [T] int32 each token's position; for padding the padding row,
        and 0."""
        rows, loc = call.arrays["rows"], call.arrays[QUERY_START]
        starts = known_or(call.arrays[STARTS], call.row_computed)
        if call.size.kind == StepKind.DECODE and self._query == 1:
            return rows, starts  # Each request has one token.
        token = torch.arange(call.size.num_tokens, dtype=torch.int32, device=loc.device)
        request = torch.searchsorted(loc[1:], token, right=True, out_int32=True).clamp(max=call.size.num_reqs - 1)
        ends = loc[1:]
        if self._query > 1:
            lengths = call.arrays[LENGTHS]
            ends = torch.cat((loc[: len(lengths)] + lengths, ends[len(lengths) :]))
        is_padding = token >= ends[request]
        positions = (starts - loc[:-1])[request] + token
        return rows[request].masked_fill(is_padding, self.limits.max_num_reqs), positions.masked_fill(is_padding, 0)
