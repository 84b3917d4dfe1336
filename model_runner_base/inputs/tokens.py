"""Tokens of a step: their ids, or their places in the device's rows; and the rows in which results are recorded."""

from collections.abc import Sequence

import numpy as np

from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import SectionUpdater, StepComponent
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import PackedStep, Section, pad_into
from model_runner_base.step.request_states import RequestStates
from model_runner_base.step.sizes import StepSize


class TokenInputs(StepComponent):
    """Gives the model its token ids; a later component may replace them by embeddings."""

    def __init__(self, requests: RequestStates) -> None:
        self._requests = requests

    def sections(self, size: StepSize) -> list[Section]:
        return [
            Section("token_ids", (size.num_tokens,)),
            Section("rows", (size.num_reqs,)),
            Section("logits_indices", (size.num_logits,)),
            Section("sample_rows", (size.num_logits,)),
        ]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        requests = self._requests
        pad_into(views["rows"], batch.rows, requests.max_num_reqs)
        fill_tokens(
            batch.rows,
            batch.query_start,
            batch.query_len,
            batch.num_computed,
            batch.is_sampled,
            batch.num_decodes,
            batch.decode_query_len,
            requests.num_known,
            requests.token_ids,
            views["token_ids"],
            views["logits_indices"],
            views["sample_rows"],
        )

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        views["rows"][:] = views["sample_rows"][:] = self._requests.max_num_reqs

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        return [_DeviceTokens(step.views["token_ids"], batch.rows, batch.decode_query_len)]

    def bind(self, call: ModelCall) -> None:
        call.kwargs["input_ids"] = call.token_ids
        call.kwargs["inputs_embeds"] = None
        call.kwargs["intermediate_tensors"] = None


class _DeviceTokens:
    """Refers all tokens of a repeated step to the device's rows, where all of them are known."""

    def __init__(self, token_ids: np.ndarray, rows: np.ndarray, decode_query_len: int) -> None:
        self._token_ids = token_ids
        self._rows = rows
        self._decode_query_len = decode_query_len

    def begin(self, positions: np.ndarray) -> None:
        tokens = self._rows[:, None] * self._decode_query_len + np.arange(self._decode_query_len)
        self._token_ids[: tokens.size] = -tokens.reshape(-1) - 1

    def advance(self, positions: np.ndarray) -> bool:
        return True


@compiled
def fill_tokens(
    rows: np.ndarray,
    query_start: np.ndarray,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    is_sampled: np.ndarray,
    num_decodes: int,
    decode_query_len: int,
    num_known: np.ndarray,
    known: np.ndarray,
    token_ids: np.ndarray,
    logits_indices: np.ndarray,
    sample_rows: np.ndarray,
) -> None:
    """Writes each token's id or place; for each logits row, its token and the row that records the result.

    ``known`` [rows, positions] int32 are the ids on the host, of which the first ``num_known`` [rows] are valid. The
    host does not know the token that was sampled in a request's last step, nor the drafts after it. Those are written
    as ``-(K + 1)``, where K is the token's place in the device's ``tokens``, flattened over all rows.

    A chunk has logits of its last token, a decode row of each of its tokens. If no token is yielded, because the prompt
    goes on or there is no draft, the result goes to the padding row, which is not read.
    """
    padding_row = len(num_known)
    end = logits = 0
    for request in range(len(rows)):
        row, start, count, token = rows[request], num_computed[request], query_len[request], query_start[request]
        token_ids[end:token] = 0
        num_unknown = max(0, start + count - max(start, num_known[row]))
        for index in range(count - num_unknown):
            token_ids[token + index] = known[row, start + index]
        for place in range(num_unknown):
            token_ids[token + count - num_unknown + place] = -(row * decode_query_len + place) - 1
        end = token + count
        if request < num_decodes and decode_query_len > 1:
            for place in range(decode_query_len):
                logits_indices[logits + place] = token + place
                sample_rows[logits + place] = row if place < count else padding_row
            logits += decode_query_len
        else:
            logits_indices[logits] = end - 1
            sample_rows[logits] = row if is_sampled[request] else padding_row
            logits += 1
    token_ids[end:] = 0
    logits_indices[logits:] = 0
    sample_rows[logits:] = padding_row
