"""The model's graph of a step: its packed buffer, the function that becomes the graph, and its runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from model_runner_base.draft.drafter import Drafter
from model_runner_base.heads.head import Head
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall, ModelResults
from model_runner_base.step.components import StepComponents
from model_runner_base.step.graph_policy import SizeDoor, StepFunction
from model_runner_base.step.packing import PackedStep, Packer
from model_runner_base.step.repeat import Repeat
from model_runner_base.step.request_states import DeviceRows
from model_runner_base.step.sizes import StepSize
from model_runner_base.step.token_layout import TokenLayout


class ModelGraph:
    """Packs a batch at a size, and runs the model on what was packed.

    ``agree`` says which size a step runs at. ``wrap`` makes a graph of a function. ``bind_kv_caches`` points the layers
    at the caches; eager runs and tracing read these, while a compiled run reads its state.
    """

    def __init__(
        self,
        model: Any,
        layout: TokenLayout,
        components: StepComponents,
        head: Head,
        drafter: Drafter,
        rows: DeviceRows,
        repeat: Repeat,
        packer: Packer,
        agree: SizeDoor,
        forward_context: ForwardContext,
        wrap: Callable[[Callable[..., Any]], StepFunction],
        bind_kv_caches: Callable[[], None],
    ) -> None:
        self._model = model
        self._layout = layout
        self._components = components
        self._head = head
        self._drafter = drafter
        self._rows = rows
        self._repeat = repeat
        self._packer = packer
        self._agree = agree
        self._forward_context = forward_context
        self._bind_kv_caches = bind_kv_caches
        self.forward = wrap(self._run)
        """``_run`` as the graph policy has wrapped it."""

    def pack(self, size: StepSize, batch: InputBatch, place: int) -> PackedStep:
        """Fills the buffer of the size that ranks agree on, given one that holds the batch, and sends it.

        ``place`` is that of the buffer among those of the steps that may repeat in turn (``Repeat.place_for``).
        """
        size, num_tokens = self._agree(size), batch.num_decode_tokens
        step = self._packer.at(size, place)
        # Padding of decode rows lies between them and the chunks.
        batch.query_start[batch.num_decodes :] += self._layout.chunk_start(size, num_tokens) - num_tokens
        self._components.fill(batch, size, step.views)
        step.send()
        return step

    def pad(self, size: StepSize) -> PackedStep:
        """Fills the buffer of the size with nothing but padding, and sends it."""
        step = self._packer.at(size)
        step.buffer[:] = 0
        self._components.fill_padding(size, step.views)
        step.send()
        return step

    def run(self, batch: InputBatch | None, step: PackedStep) -> ModelResults:
        """Launches the graph on a packed step, or on padding if ``batch`` is None.

        The caller has set vLLM's forward context of steps.

        Returns the tensors that the head makes of the hidden states, and those that drafting needs in addition.
        """
        self._components.prepare(batch, step, self._rows)
        tokens, computed, *_ = self._rows.tensors
        sent = step.on_device, step.entries_on_device
        logits, sample_slots, hidden_states, *for_drafts, step.on_device = self.forward(
            step.size, *sent, tokens, computed, *self._components.tensors
        )
        return ModelResults(logits, sample_slots, hidden_states, tuple(for_drafts))

    def dummy_run(self, size: StepSize) -> ModelResults:
        """Runs the graph of a size on nothing but padding; returns as ``run``. Other ranks are not asked."""
        self._bind_kv_caches()
        self._repeat.stop()
        with override_forward_context(self._forward_context):
            return self.run(None, self.pad(size))

    def warm_up_drafter(self, size: StepSize, results: ModelResults) -> None:
        """Runs the drafting that follows a step of a size; ``results`` are what the step's run returned."""
        self._drafter.warm_up_at(self._packer.at(size), results)

    def _run(
        self,
        size: StepSize,
        packed: torch.Tensor,
        entries: torch.Tensor,
        tokens: torch.Tensor,
        computed: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Sequence[torch.Tensor]:
        """The function that becomes a graph: returns the results of ``run``, and the packed buffer.

        Args:
            size: the step's.
            packed: [N] int32, the packed buffer.
            entries: [2, E] int32, places in the buffer and the numbers to write there.
            tokens, computed: tensors of ``DeviceRows``.
            tensors: further tensors that components read.
        """
        packed = packed.index_put((entries[0],), entries[1])
        call = ModelCall.unpack(size, packed, self._components.sections(size), tokens, computed)
        self._components.bind(call, tensors)
        context = get_forward_context()
        context.moe_layer_index = 0  # vLLM's own expert layers count it up in each step.
        context.attn_metadata, context.slot_mapping = call.metadata, call.slot_mapping
        output = self._model(**call.arguments)
        context.attn_metadata = None  # type: ignore[assignment]
        hidden_states, for_drafts = self._drafter.keep(output, call)
        results = *self._head.traced(hidden_states, call), *for_drafts, packed
        self._components.unbind()
        return results
