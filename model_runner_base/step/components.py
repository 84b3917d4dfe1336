"""Components of a step: what has sections of the packed buffer, further tensors of the graph, or work before or after a
step.

A feature of the model, such as LoRA, is a component in one list (``runner/wiring.py``). All components are called in
the list's order. A component may read sections that an earlier one has written (``reads``), and what an earlier one has
bound in a ``ModelCall``. Code that needs one component alone also holds it by name, as ``take_draft_token_ids`` does
with the drafter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import NO_FIELDS, Forward, ModelCall, joined_fields
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.request_states import DeviceRows, RequestInfo
from model_runner_base.step.schedule import Schedule
from model_runner_base.step.sizes import StepSize


class SectionUpdater(Protocol):
    """Keeps a component's sections up to date while a step is repeated."""

    def begin(self, positions: np.ndarray) -> None:
        """Called once, before the first repeat; ``positions`` [R] int64 are those of the R requests when packed."""

    def advance(self, positions: np.ndarray) -> bool:
        """Updates the sections for the new ``positions``: one token further each, or several where drafts are verified.

        Returns False if the buffer has no space for the update, so that the step must be built from scratch.
        """


class StepComponent:
    """Interface of a component. Each default does nothing, and only methods that are overridden are called."""

    prompts_in_chunks = False
    """Whether all tokens of a prompt must be in chunks, and none in a decode row."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Sections of earlier components that ``fill``, ``repeat`` or ``bind`` reads or overwrites."""

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        """Called when a request takes a row; ``token_ids`` are its prompt and its output so far."""

    # ---- Every step, also one without tokens ----

    def begin_step(self, schedule: Schedule) -> None:
        """Called when rows and cache blocks are up to date, before the step is packed."""

    def end_step(self, forward: Forward | None) -> Mapping[str, Any]:
        """Called when the step's work is launched; returns fields of its ``ModelRunnerOutput``, by name.

        ``errors`` are the reasons of failed requests, by request. Of other fields each has one component that reports
        it. ``forward`` is the step's forward pass, with its results; None for a step without tokens.
        """
        return NO_FIELDS

    def run_idle(self) -> None:
        """Called in place of a step while only other replicas have requests, or if all its requests have failed."""

    def read_output(self, batch: InputBatch, output: Any) -> None:
        """Called with the ``ModelRunnerOutput`` of a step with tokens, if each is read before the next one."""

    # ---- On the host ----

    def sections(self, size: StepSize) -> list[Section]:
        """Sections of the packed buffer that the component fills."""
        return []

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Writes the component's sections, including their padding.

        ``batch.query_start`` are indices in the padded tokens. ``views`` are writable and have all sections by name,
        with what the last step of this size left there.
        """

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Writes the component's sections for a step of padding only. They are zero when this is called."""

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater] | None:
        """Returns the objects that keep the sections up to date while the step is repeated; it has decode rows only.

        None: the step cannot be repeated. ``()``: the sections stay as they were packed. A component that fills
        sections must override this, or no step is ever repeated.
        """
        return None

    def prepare(self, batch: InputBatch | None, step: PackedStep, rows: DeviceRows) -> None:
        """Called before every run, once the buffer is on the device; not part of the graph.

        ``batch`` is None for a run on padding.
        """

    # ---- Part of the graph ----

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors that the graph takes besides the packed buffer and the rows. How many there are never changes."""
        return ()

    def bind(self, call: ModelCall) -> None:
        """Adds arguments of the model and metadata of its layers to ``call``.

        ``call.tensors`` are the component's own ``tensors`` inside the graph.
        """

    def unbind(self) -> None:
        """Releases what ``bind`` computed in the graph; called after the model has run and its logits are computed."""

    def warm_up(self) -> None:
        """Runs once each function that the component runs on the device outside of the step's graph."""


class PromptsInChunks(StepComponent):
    """Component of a pipeline stage that has all prompts in chunks, as the stage with items or the pooler has them."""

    prompts_in_chunks = True


class StepComponents:
    """List of all components in order. Each of its methods calls the components that override this method."""

    def __init__(self, components: Iterable[StepComponent]) -> None:
        self.prompts_in_chunks = False
        self._all: list[StepComponent] = []
        self._admit: list[Callable[..., None]] = []
        self._begin_step: list[Callable[[Schedule], None]] = []
        self._read_output: list[Callable[[InputBatch, Any], None]] = []
        self._end_step: list[Callable[[Forward | None], Mapping[str, Any]]] = []
        self._run_idle: list[Callable[[], None]] = []
        self._sections: list[Callable[..., list[Section]]] = []
        self._fill: list[Callable[..., None]] = []
        self._fill_padding: list[Callable[..., None]] = []
        self._repeat: list[Callable[..., Sequence[SectionUpdater] | None]] = []
        self._prepare: list[Callable[..., None]] = []
        self._bind: list[tuple[Callable[..., None], int]] = []
        self._unbind: list[Callable[[], None]] = []
        self._warm_up: list[Callable[[], None]] = []
        self._with_tensors: list[StepComponent] = []
        for component in components:
            self.add(component)

    def add(self, component: StepComponent) -> None:
        """Appends a component."""

        def has(name: str) -> bool:
            return getattr(type(component), name) is not getattr(StepComponent, name)

        def note(methods: list[Any], name: str) -> None:
            if has(name):
                methods.append(getattr(component, name))

        self._all.append(component)
        self.prompts_in_chunks |= component.prompts_in_chunks
        note(self._admit, "admit")
        note(self._begin_step, "begin_step")
        note(self._end_step, "end_step")
        note(self._run_idle, "run_idle")
        note(self._read_output, "read_output")
        note(self._sections, "sections")
        note(self._fill, "fill")
        note(self._fill_padding, "fill_padding")
        note(self._prepare, "prepare")
        note(self._unbind, "unbind")
        note(self._warm_up, "warm_up")
        count = len(component.tensors)
        if count:
            self._with_tensors.append(component)
        if has("bind") or count:
            self._bind.append((component.bind, count))
        if has("sections") or has("fill") or has("repeat"):
            self._repeat.append(component.repeat)

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        for admit in self._admit:
            admit(row, info, token_ids)

    def begin_step(self, schedule: Schedule) -> None:
        for begin_step in self._begin_step:
            begin_step(schedule)

    def end_step(self, forward: Forward | None) -> Mapping[str, Any]:
        """Fields of the step's output that components report (``joined_fields``)."""
        fields = NO_FIELDS
        for end_step in self._end_step:
            if reported := end_step(forward):
                fields = joined_fields(fields, reported)
        return fields

    def run_idle(self) -> None:
        for run_idle in self._run_idle:
            run_idle()

    def read_output(self, batch: InputBatch, output: Any) -> None:
        for read in self._read_output:
            read(batch, output)

    def sections(self, size: StepSize) -> list[Section]:
        """Sections of the whole packed buffer."""
        return [section for sections in self._sections for section in sections(size)]

    def checked_sections(self, size: StepSize) -> list[Section]:
        """Returns ``sections``; raises ValueError if a section has two writers, or a reader before its writer."""
        written: set[str] = set()
        for component in self._all:
            name = type(component).__name__
            if missing := [section for section in component.reads if section not in written]:
                raise ValueError(f"{name} reads {', '.join(missing)}, which no component before it writes")
            for section in component.sections(size):
                if section.name in written:
                    raise ValueError(f"{name} has a section that there is already: {section.name}")
                written.add(section.name)
        return self.sections(size)

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        for fill in self._fill:
            fill(batch, size, views)

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        for fill_padding in self._fill_padding:
            fill_padding(size, views)

    def repeat(self, batch: InputBatch, step: PackedStep) -> list[SectionUpdater] | None:
        """Returns the objects that keep all sections up to date; None if a component has none for its own sections."""
        updaters: list[SectionUpdater] = []
        for repeat in self._repeat:
            of_component = repeat(batch, step)
            if of_component is None:
                return None
            updaters += of_component
        return updaters

    def prepare(self, batch: InputBatch | None, step: PackedStep, rows: DeviceRows) -> None:
        for prepare in self._prepare:
            prepare(batch, step, rows)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of all components, as ``bind`` takes them."""
        return [tensor for component in self._with_tensors for tensor in component.tensors]

    def bind(self, call: ModelCall, tensors: Sequence[torch.Tensor]) -> None:
        start = 0
        for bind, count in self._bind:
            call.tensors = tensors[start : start + count]
            bind(call)
            start += count

    def unbind(self) -> None:
        for unbind in self._unbind:
            unbind()

    def warm_up(self) -> None:
        for warm_up in self._warm_up:
            warm_up()
