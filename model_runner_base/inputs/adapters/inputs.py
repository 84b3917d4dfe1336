"""Adapter slots of the step's tokens, which the LoRA layers read."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from vllm.lora.request import LoRARequest

from model_runner_base.inputs.adapters.slots import NO_SLOT, Products
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import SectionUpdater, StepComponent
from model_runner_base.step.host_loops import compiled
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.request_states import RequestStates
from model_runner_base.step.sizes import StepSize

SECTION = "adapter_slots"


class SlottedAdapters(Protocol):
    """Adapters that have slots on the device (``lora.py``)."""

    products: Products
    batches_take_turns: bool

    @property
    def ids(self) -> Sequence[int | None]: ...

    def ready(self, requests: Iterable[LoRARequest]) -> dict[int, int]: ...

    def warm_up(self) -> None: ...


class AdapterInputs(StepComponent):
    """Writes the slot of each token. A repeated step has the same requests, so its section stays as it was packed.

    Where batches take turns (``SlottedAdapters.batches_take_turns``), another one's adapter may have taken a slot
    meanwhile.
    """

    def __init__(self, requests: RequestStates, adapters: SlottedAdapters) -> None:
        self._requests = requests
        self._adapters = adapters
        self._slots = np.full(requests.max_num_reqs, NO_SLOT, np.int32)
        """Slot of each request row, as of the last step that was packed."""

    def sections(self, size: StepSize) -> list[Section]:
        return [Section(SECTION, (size.num_tokens,))]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        self._slots[batch.rows] = slots = self._find(batch)
        fill_slots(slots, batch.query_start, batch.query_len, batch.num_decodes, batch.decode_query_len, views[SECTION])

    def _find(self, batch: InputBatch) -> np.ndarray:
        """Finds the slot [R] of each request's adapter; loads the adapter if it is not in a slot."""
        wanted = [info.adapter for info in self._requests.infos_of(batch.rows)]
        slots = self._adapters.ready(filter(None, wanted))
        return np.array([NO_SLOT if each is None else slots[each.lora_int_id] for each in wanted], np.int32)

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        views[SECTION][:] = NO_SLOT

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        return [_SameSlots(self._adapters, self._slots[batch.rows])] if self._adapters.batches_take_turns else ()

    def warm_up(self) -> None:
        self._adapters.warm_up()

    def bind(self, call: ModelCall) -> None:
        slots = call.arrays[SECTION]
        self._adapters.products.bind(slots, slots[call.arrays["logits_indices"]])

    def unbind(self) -> None:
        self._adapters.products.unbind()

    def logits_inputs(self, row: int | None, count: int) -> tuple[np.ndarray, ...]:
        """Returns the slots for ``Adapters.logits_inputs``."""
        slot = NO_SLOT if row is None else self._slots[row]
        return (np.full(count, slot, np.int32),)


class _SameSlots:
    """Ends a series of repeated steps once one of their slots has another adapter."""

    def __init__(self, adapters: SlottedAdapters, slots: np.ndarray) -> None:
        """``slots`` [R] are those of a step's requests, in which their adapters are now."""
        self._adapters = adapters
        ids = adapters.ids
        self._expected = [(slot, ids[slot]) for slot in set(slots.tolist()) - {NO_SLOT}]

    def begin(self, positions: np.ndarray) -> None:
        """Does nothing: the section stays as it was packed."""

    def advance(self, positions: np.ndarray) -> bool:
        ids = self._adapters.ids
        return all(ids[slot] == number for slot, number in self._expected)


@compiled
def fill_slots(
    slots: np.ndarray,
    query_start: np.ndarray,
    query_len: np.ndarray,
    num_decodes: int,
    decode_query_len: int,
    token_slots: np.ndarray,
) -> None:
    """Writes each request's slot at its tokens and NO_SLOT at padding; a decode row has ``decode_query_len`` tokens."""
    token_slots[:] = -1
    for request in range(len(slots)):
        count = decode_query_len if request < num_decodes else query_len[request]
        start = query_start[request]
        token_slots[start : start + count] = slots[request]
