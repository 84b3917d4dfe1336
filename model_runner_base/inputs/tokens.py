"""What each token is: its id, or the row whose last token it is; the requests' rows, and where they are sampled."""

from collections.abc import Sequence

import numpy as np
import torch

from model_runner_base.host_loops import compiled
from model_runner_base.requests.states import RequestInfo, RequestStates
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.packing import PackedStep, Section, pad_into
from model_runner_base.step.repeat import RepeatPart
from model_runner_base.step.sizes import StepSize


class TokenInputs:
    """Token ids are all there is."""

    def __init__(self, requests: RequestStates) -> None:
        self._requests = requests

    def admit(self, row: int, info: RequestInfo) -> None:
        """A request took a row."""

    def sections(self, size: StepSize) -> list[Section]:
        return [
            Section("token_ids", (size.num_tokens,)),
            Section("rows", (size.num_reqs,)),
            Section("logits_indices", (size.num_logits,)),
            Section("sample_rows", (size.num_logits,)),
        ]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Writes the sections, padding included; the batch's ``query_start`` counts padding."""
        requests = self._requests
        pad_into(views["rows"], batch.rows, requests.max_num_reqs)
        fill_tokens(
            batch.rows,
            batch.query_start,
            batch.query_len,
            batch.num_computed,
            batch.is_sampled,
            requests.num_known,
            requests.token_ids,
            views["token_ids"],
            views["logits_indices"],
            views["sample_rows"],
        )

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """What is not zero in a step of nothing but padding."""
        views["rows"][:] = views["sample_rows"][:] = self._requests.max_num_reqs

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart]:
        """What keeps the sections up while the step, all decode rows, is repeated."""
        return [_DeviceTokens(step.views["token_ids"], batch.rows)]

    def prepare(self, batch: InputBatch) -> None:
        """Called before every run of a batch."""

    def warm_up(self) -> None:
        """Runs what this room has on the device once."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """What the graph takes beside the packed buffer and the rows."""
        return ()

    def bind(self, call: ModelCall, model: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        """Sets what the model is called with for its tokens. Part of the graph."""
        call.kwargs["input_ids"] = call.token_ids
        call.kwargs["inputs_embeds"] = None


class _DeviceTokens:
    """While a step is repeated the device knows all its tokens."""

    def __init__(self, token_ids: np.ndarray, rows: np.ndarray) -> None:
        self._token_ids = token_ids
        self._rows = rows

    def begin(self, positions: np.ndarray) -> None:
        self._token_ids[: len(self._rows)] = -self._rows - 1

    def follow(self, positions: np.ndarray) -> bool:
        return True


@compiled
def fill_tokens(
    rows: np.ndarray,
    query_start: np.ndarray,
    query_len: np.ndarray,
    num_computed: np.ndarray,
    is_sampled: np.ndarray,
    num_known: np.ndarray,
    known: np.ndarray,
    token_ids: np.ndarray,
    logits_indices: np.ndarray,
    sample_rows: np.ndarray,
) -> None:
    """What each token is, and for each request its last token and the row that what is drawn there goes to.

    ``known`` [rows, positions] int32 are the ids on the host, ``num_known`` [rows] of them. At most the last token of a
    request is unknown to the host, the one sampled in its last step: it is ``-(row + 1)``, the device knows. A row with
    prompt left yields no token: what is drawn for it goes to the padding row, where nobody looks.
    """
    padding_row = len(num_known)
    end = 0
    for request in range(len(rows)):
        row, start, count, token = rows[request], num_computed[request], query_len[request], query_start[request]
        token_ids[end:token] = 0
        for index in range(count):
            token_ids[token + index] = known[row, start + index]
        end = token + count
        if start + count > num_known[row]:
            token_ids[end - 1] = -row - 1
        logits_indices[request] = end - 1
        sample_rows[request] = row if is_sampled[request] else padding_row
    token_ids[end:] = 0
    logits_indices[len(rows) :] = 0
    sample_rows[len(rows) :] = padding_row
