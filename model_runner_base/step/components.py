"""Components of a step: the parts that have sections of the packed buffer, or further tensors of the graph.

A feature is a component in the list. All components are called in the list's order. A component may read sections that
one before it has written (``reads``), and what one before it has bound in a ``ModelCall``. Code that needs a single
component, as ``sample_tokens`` needs the drafter, holds it by name in addition.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from model_runner_base.requests.device_rows import DeviceRows
from model_runner_base.requests.states import RequestInfo
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.sizes import StepSize


class RepeatPart(Protocol):
    """Upkeep of a component's sections while a step is repeated."""

    def begin(self, positions: np.ndarray) -> None:
        """Called once, before the first repeat; ``positions`` [R] int64 are those of the step that was packed."""

    def follow(self, positions: np.ndarray) -> bool:
        """Updates the sections for ``positions``, which have moved on by one token, or by several where drafts are
        verified. Returns False if the buffer has no space for that."""


class StepComponent:
    """Interface of a part of the step; each default does nothing, and a method costs nothing unless it is
    overridden."""

    prompts_in_chunks = False
    """Whether no token of a prompt may have a decode row."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Sections of components before this one that ``fill``, ``repeat`` or ``bind`` reads, or writes over."""

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        """Called when a request takes a row; ``token_ids`` are its prompt and its output so far."""

    # ---- On the host ----

    def sections(self, size: StepSize) -> list[Section]:
        """Sections of the packed buffer that the component fills."""
        return []

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Writes the component's sections, padding included; the batch's ``query_start`` counts padding.

        ``views`` are writable and hold all sections, with what the last step of this size left there.
        """

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        """Writes the numbers that are not zero in a step of nothing but padding."""

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[RepeatPart] | None:
        """Returns what keeps the sections up to date while the step, all decode rows, is repeated.

        None: the step cannot be repeated. ``()``: the sections stay as they were packed, which a component that fills
        sections has to say.
        """
        return None

    def prepare(self, batch: InputBatch | None, step: PackedStep, rows: DeviceRows) -> None:
        """Called before every run, when the buffer is on the device; not part of the graph.

        ``batch`` is None for a run on padding.
        """

    # ---- Part of the graph ----

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors that the graph takes with the packed buffer and the rows; their number never changes."""
        return ()

    def bind(self, call: ModelCall) -> None:
        """Adds to the model's arguments and to its layers' metadata.

        ``call.tensors`` are the component's own ``tensors``, as the graph has them.
        """

    def unbind(self) -> None:
        """Releases tensors that the graph computed; called once the model has run and its logits are computed."""

    def warm_up(self) -> None:
        """Runs once each function that the component runs on the device outside of the step's graph."""


class StepComponents:
    """List of components in order. Only methods that a component overrides are called."""

    def __init__(self, components: Iterable[StepComponent]) -> None:
        self.prompts_in_chunks = False
        self._all: list[StepComponent] = []
        self._admit: list[Callable[..., None]] = []
        self._sections: list[Callable[..., list[Section]]] = []
        self._fill: list[Callable[..., None]] = []
        self._fill_padding: list[Callable[..., None]] = []
        self._repeat: list[Callable[..., Sequence[RepeatPart] | None]] = []
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

        def note(asked: list[Any], name: str) -> None:
            if has(name):
                asked.append(getattr(component, name))

        self._all.append(component)
        self.prompts_in_chunks |= component.prompts_in_chunks
        note(self._admit, "admit")
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

    def sections(self, size: StepSize) -> list[Section]:
        """Sections of the whole packed buffer."""
        return [section for sections in self._sections for section in sections(size)]

    def checked_sections(self, size: StepSize) -> list[Section]:
        """Returns ``sections``; raises ValueError if one has two writers, or is read before its writer in the list."""
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

    def repeat(self, batch: InputBatch, step: PackedStep) -> list[RepeatPart] | None:
        """Returns what keeps all sections up to date; None if a component cannot do so for its own."""
        parts: list[RepeatPart] = []
        for repeat in self._repeat:
            of_component = repeat(batch, step)
            if of_component is None:
                return None
            parts += of_component
        return parts

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
