"""A step without a model: what its components send to the device, and what the step's graph makes of it there."""

from collections.abc import Callable, Sequence

import torch

from model_runner_base.caches.factory import make_layout
from model_runner_base.caches.group import CacheKind
from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.tokens import TokenInputs
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import StepComponent, StepComponents
from model_runner_base.step.packing import PackedStep, Packer
from model_runner_base.step.repeat import Repeat
from model_runner_base.step.request_states import DeviceRows, RequestStates, commit
from model_runner_base.step.schedule import Schedule
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize
from model_runner_base.step.trace import LayerTrace


class BareStep:
    """Requests, tokens, their layout, kinds of caches and further components, called as the runner calls them."""

    def __init__(
        self,
        caches: Sequence[CacheKind],
        limits: StepLimits,
        max_num_reqs: int,
        max_length: int,
        further: Callable[[RequestStates], list[StepComponent]] = lambda requests: [],
    ) -> None:
        device_ops = DeviceOps(torch.device("cpu"))
        self.caches = caches
        self.layout = make_layout(caches, limits)
        self.requests = RequestStates(max_num_reqs, max_length)
        self.rows = DeviceRows(max_num_reqs, device_ops)
        self.tokens = TokenInputs(self.requests)
        self.components = StepComponents([self.tokens, self.layout, *caches, *further(self.requests)])
        self.repeat = Repeat(self.requests)
        self.packer = Packer(self.components.checked_sections, device_ops)

    def fill_padding(self, size: StepSize) -> None:
        """Fills the size's buffer with a step of nothing but padding."""
        step = self.packer.at(size)
        step.buffer[:] = 0
        self.components.fill_padding(size, step.views)

    def send(self, batch: InputBatch, size: StepSize) -> PackedStep:
        """Fills the size's buffer, whatever it held before, and sends it; the batch is packed once."""
        assert any(size.holds(need) for need in self.layout.needs(batch))
        step, rows = self.packer.at(size, self.repeat.place_for(batch)), batch.num_decodes
        batch.query_start[rows:] += self.layout.chunk_start(size, rows) - rows
        self.components.fill(batch, size, step.views)
        step.send()
        self.repeat.watch(batch, step, self.components)
        return step

    def run(self, batch: InputBatch, step: PackedStep) -> ModelCall:
        """Computes what the step's graph does before it calls the model; the buffer stays on the device."""
        self.components.prepare(batch, step, self.rows)
        entries = step.entries_on_device
        step.on_device = step.on_device.index_put((entries[0],), entries[1])
        call = ModelCall.unpack(step.size, step.on_device, step.sections, *self.rows.tensors)
        self.components.bind(call, self.components.tensors)
        return call

    def trace(self, call: ModelCall, batch: InputBatch) -> dict[str, LayerTrace]:
        """Traces of the layers of all kinds, by name."""
        self.layout.bind(call)
        return {name: layer for kind in self.caches for name, layer in kind.trace(call, batch).items()}

    def commit(self, call: ModelCall, tokens: Sequence[int]) -> None:
        """Records on the device what was sampled; ``tokens`` are of every logits row, padding included."""
        commit(self.rows.tensors, call.sample_slots, torch.tensor(tokens, dtype=torch.int32))


def scheduled(num_tokens: dict[str, int]) -> Schedule:
    """A step of requests that the runner knows, without new requests or new blocks."""
    continued: list[str] = list(num_tokens)
    return Schedule((), (), [], continued, [None] * len(continued), num_tokens, sum(num_tokens.values()))


def padded(limits: StepLimits, needs: Sequence[StepSize], padding: int, pairs: int | None = None) -> StepSize:
    """A size that holds each of ``needs``, all of one kind, with ``padding`` more of each dim."""
    named = [limits.named(need) for need in needs]
    dims = {dim.name: max(each[dim.name] for each in named) + padding for dim in limits.dims}
    if pairs is not None:
        dims["decode_pairs"] += pairs - padding
    if "decode_rows" in dims:
        # Every token is a decode row's or a chunk's.
        is_mixed = needs[0].kind == StepKind.MIXED
        dims["tokens"] = dims["decode_rows"] + (dims["chunk_tokens"] if is_mixed else 0)
        if not is_mixed:
            dims["requests"] = dims["logits"] = dims["decode_rows"]
            dims["chunk_tokens"] = dims["chunk_tiles"] = dims["chunk_pairs"] = 0
    return limits.size(needs[0].kind, **dims)
