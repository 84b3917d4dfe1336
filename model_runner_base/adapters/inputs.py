"""Which adapter each token's request has: the slot, which the LoRA layers read."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from vllm.lora.request import LoRARequest

from model_runner_base.adapters.products import NO_SLOT, Products
from model_runner_base.host_loops import compiled
from model_runner_base.inputs.tokens import TokenInputs
from model_runner_base.requests.states import RequestInfo, RequestStates
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.repeat import RepeatPart
from model_runner_base.step.sizes import StepSize

SECTION = "adapter_slots"


class SlottedAdapters(Protocol):
    """Adapters that have slots on the device (``lora.py``)."""

    products: Products

    def ready(self, requests: Iterable[LoRARequest]) -> dict[int, int]: ...

    def warm_up(self) -> None: ...


class AdapterInputs(TokenInputs):
    """Other inputs, and the slot of each token beside them.

    While a step is repeated its requests are the same, so what was packed stays.
    """

    def __init__(self, inputs: TokenInputs, requests: RequestStates, adapters: SlottedAdapters) -> None:
        super().__init__(requests)
        self.prompts_in_chunks = inputs.prompts_in_chunks
        self._inputs = inputs
        self._adapters = adapters
        self._slots = np.full(requests.max_num_reqs, NO_SLOT, np.int32)
        """By row, as the last step that was packed had them."""

    def admit(self, row: int, info: RequestInfo) -> None:
        self._inputs.admit(row, info)

    def sections(self, size: StepSize) -> list[Section]:
        return [*self._inputs.sections(size), Section(SECTION, (size.num_tokens,))]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        self._inputs.fill(batch, size, views)
        self._slots[batch.rows] = slots = self._find(batch)
        fill_slots(slots, batch.query_start, batch.query_len, batch.num_decodes, batch.row_len, views[SECTION])

    def _find(self, batch: InputBatch) -> np.ndarray:
        """[R] the slot of each request's adapter, which is loaded if it is not there."""
        wanted = [info.adapter for info in self._requests.infos_of(batch.rows)]
        slots = self._adapters.ready(filter(None, wanted))
        return np.array([NO_SLOT if each is None else slots[each.lora_int_id] for each in wanted], np.int32)

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        self._inputs.fill_padding(size, views)
        views[SECTION][:] = NO_SLOT

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart]:
        return self._inputs.repeat(batch, step)

    def prepare(self, batch: InputBatch) -> None:
        self._inputs.prepare(batch)

    def warm_up(self) -> None:
        self._inputs.warm_up()
        self._adapters.warm_up()

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._inputs.tensors

    def bind(self, call: ModelCall, model: Any, tensors: Sequence[torch.Tensor]) -> None:
        slots = call.arrays[SECTION]
        self._adapters.products.bind(slots, slots[call.arrays["logits_indices"]])
        self._inputs.bind(call, model, tensors)  # Which may look embeddings up.

    def unbind(self) -> None:
        self._inputs.unbind()
        self._adapters.products.unbind()

    def beside_logits(self, row: int | None, count: int) -> tuple[np.ndarray, ...]:
        slot = NO_SLOT if row is None else self._slots[row]
        return (np.full(count, slot, np.int32),)

    def bind_logits(self, slots: torch.Tensor) -> None:  # type: ignore[override]
        self._adapters.products.bind(slots, slots)


@compiled
def fill_slots(
    slots: np.ndarray,
    query_start: np.ndarray,
    query_len: np.ndarray,
    num_decodes: int,
    row_len: int,
    token_slots: np.ndarray,
) -> None:
    """Writes each request's slot at its tokens, all that a decode row has room for; none at padding."""
    token_slots[:] = -1
    for request in range(len(slots)):
        count = row_len if request < num_decodes else query_len[request]
        start = query_start[request]
        token_slots[start : start + count] = slots[request]
