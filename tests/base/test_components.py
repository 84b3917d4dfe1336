"""The list of a step's components: which are asked what, in which order, and which lists are refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from model_runner_base.step.components import StepComponent, StepComponents
from model_runner_base.step.packing import Section

SIZE: Any = SimpleNamespace(num_tokens=4)


class Named(StepComponent):
    """A component that notes what it is asked."""

    def __init__(self, name: str, log: list[str], num_tensors: int = 0, repeats: Any = ()) -> None:
        self.name, self.log, self.repeats = name, log, repeats
        self.given = [torch.full((1,), float(number)) for number in range(num_tensors)]
        self.bound: list[float] = []

    def sections(self, size: Any) -> list[Section]:
        return [Section(self.name, (size.num_tokens,))]

    def fill(self, batch: Any, size: Any, views: dict[str, np.ndarray]) -> None:
        self.log.append(self.name)

    def repeat(self, batch: Any, step: Any) -> Any:
        return self.repeats

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.given

    def bind(self, call: Any) -> None:
        self.bound = [tensor.item() for tensor in call.tensors]


class Reader(Named):
    reads = ("first",)


class Silent(StepComponent):
    """Component with a section that does not say what becomes of it while a step is repeated."""

    def sections(self, size: Any) -> list[Section]:
        return [Section("silent", (1,))]


class Twice(StepComponent):
    def sections(self, size: Any) -> list[Section]:
        return [Section("twice", (1,)), Section("twice", (2,))]


class Holder(StepComponent):
    """Component with a tensor that binds nothing."""

    tensors = (torch.zeros(1),)


class Overwriter(StepComponent):
    """Component that writes into another's section, and does not say what becomes of that while a step is repeated."""

    def fill(self, batch: Any, size: Any, views: dict[str, np.ndarray]) -> None:
        views["first"][:] = 0


class Asked(StepComponent):
    """Component that notes all that it is asked."""

    prompts_in_chunks = True

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def admit(self, row: int, info: Any, token_ids: list[int]) -> None:
        self.log.append(("admit", row, token_ids))

    def fill_padding(self, size: Any, views: dict[str, np.ndarray]) -> None:
        self.log.append(("fill_padding", size))

    def prepare(self, batch: Any, step: Any, rows: Any) -> None:
        self.log.append(("prepare", batch, step, rows))

    def begin_step(self, schedule: Any) -> None:
        self.log.append(("begin_step", schedule))

    def read_output(self, batch: Any, output: Any) -> None:
        self.log.append(("read_output", batch, output))

    def unbind(self) -> None:
        self.log.append("unbind")

    def warm_up(self) -> None:
        self.log.append("warm_up")


def test_are_asked_in_their_order() -> None:
    log: list[str] = []
    components = StepComponents([Named("first", log), StepComponent(), Reader("second", log)])
    components.add(Named("third", log))
    assert [section.name for section in components.checked_sections(SIZE)] == ["first", "second", "third"]
    assert components.checked_sections(SIZE) == components.sections(SIZE)
    batch: Any = None
    components.fill(batch, SIZE, {})
    assert log == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda log: [Reader("second", log), Named("first", log)], "Reader reads first, which no component before it"),
        (lambda log: [Named("first", log), Named("first", log)], "Named has a section that there is already: first"),
        (lambda log: [Twice()], "Twice has a section that there is already: twice"),
    ],
    ids=["reads what comes later", "a section of two", "a section twice in one"],
)
def test_an_order_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepComponents(make([])).checked_sections(SIZE)


def test_each_is_bound_with_its_own_tensors() -> None:
    """A graph may replace a component's tensors, so the list reads them anew."""
    log: list[str] = []
    many, none, one = Named("many", log, 2), Named("none", log), Named("one", log, 1)
    components = StepComponents([many, Holder(), none, one])
    one.given = [torch.full((1,), 7.0)]
    call: Any = SimpleNamespace()
    components.bind(call, components.tensors)
    assert (many.bound, none.bound, one.bound) == ([0.0, 1.0], [], [7.0])


@pytest.mark.parametrize(
    ("repeats", "want"), [([(), ("b",)], ["b"]), ([("a",), ("b", "c")], ["a", "b", "c"]), ([("a",), None], None)]
)
def test_a_step_is_repeated_if_all_can(repeats: list[Any], want: Any) -> None:
    components = StepComponents(Named(str(index), [], 0, each) for index, each in enumerate(repeats))
    components.add(StepComponent())
    batch: Any = None
    assert components.repeat(batch, batch) == want


@pytest.mark.parametrize("component", [Silent(), Overwriter()], ids=["own section", "another's"])
def test_a_section_of_which_nothing_is_said_is_not_repeated(component: StepComponent) -> None:
    batch: Any = None
    assert StepComponents([component]).repeat(batch, batch) is None


def test_whatever_a_component_overrides_it_is_asked() -> None:
    log: list[Any] = []
    components, info = StepComponents([StepComponent(), Asked(log)]), None
    assert components.prompts_in_chunks and not StepComponents([StepComponent()]).prompts_in_chunks
    components.admit(3, info, [1, 2])  # type: ignore[arg-type]
    components.fill_padding(SIZE, {})
    components.prepare(None, "step", "rows")  # type: ignore[arg-type]
    components.begin_step("schedule")  # type: ignore[arg-type]
    components.read_output("batch", "output")  # type: ignore[arg-type]
    components.unbind()
    components.warm_up()
    assert log == [
        ("admit", 3, [1, 2]),
        ("fill_padding", SIZE),
        ("prepare", None, "step", "rows"),
        ("begin_step", "schedule"),
        ("read_output", "batch", "output"),
        "unbind",
        "warm_up",
    ]


class Reports(StepComponent):
    """Component that reports fields of the output."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def end_step(self, forward: Any) -> dict[str, Any]:
        return self.fields


def test_reports_of_several_are_put_together() -> None:
    components = StepComponents([Reports(errors={"a": "one"}, first=1), StepComponent(), Reports(errors={"b": None})])
    components.add(Reports(second=2))
    assert components.end_step(None) == {"errors": {"a": "one", "b": None}, "first": 1, "second": 2}
    components.add(Reports(first=3))
    with pytest.raises(ValueError, match="two components report first of the step's output"):
        components.end_step(None)
