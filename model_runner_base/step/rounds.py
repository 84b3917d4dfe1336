"""Loops and functions of a step that graphs hold in a form of their own: loops as rounds, and functions as one node.

What would take memory for the largest step is computed in rounds, each of a fixed size. A loop is Python's in eager
steps, ``torch.while_loop`` where Dynamo traces, or that of a device that traces in a way of its own (``loops_run_by``).
It ends with the last round that counts, except where a compiler knows no loops.

Dynamo takes some 10 ms for every operation on symbolic sizes, and it unrolls loops that a lazy device would run as
loops. A graph that is later run operation by operation, as on such a device, can be captured without a look inside a
function (``OneNode``): the capture sees one call, and the shape of its result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

State = tuple[torch.Tensor, ...]
Body = Callable[[torch.Tensor, State, State], State]
"""Type of a loop's body: from the number of the round, an int32 scalar, the state, and the tensors that it reads, it
makes the next state, of the same shapes."""
Loop = Callable[[torch.Tensor, int, Body, State, State], State]
"""Type of a loop: takes the number of rounds that count, an int32 scalar, the largest number of them, the body, the
first state, and the tensors that the body reads. Further rounds change nothing."""

MOST_UNROLLED = 16
"""Largest number of rounds in a graph that holds each of them, where rounds may be larger instead."""

_loop_of_tracer: Loop | None = None


@contextmanager
def loops_run_by(loop: Loop) -> Iterator[None]:
    """Makes ``loop`` run the loops of functions that are called inside the block.

    It is for a device that traces operations in a way of its own, with tensors that have no contents yet.
    """
    global _loop_of_tracer
    before, _loop_of_tracer = _loop_of_tracer, loop
    try:
        yield
    finally:
        _loop_of_tracer = before


def is_traced() -> bool:
    """Whether a graph is being traced, by Dynamo or by a device's tracer."""
    return _loop_of_tracer is not None or torch.compiler.is_dynamo_compiling()


def is_unrolled() -> bool:
    """Whether a graph is being traced that will hold each round."""
    return _loop_of_tracer is unrolled


def run_rounds(rounds: torch.Tensor, most: int, body: Body, state: State, reads: State) -> State:
    """Runs ``body`` as the type ``Loop`` says; in graphs, no two of ``state`` and ``reads`` may share memory."""
    loop = _loop_of_tracer or (_while_loop if is_traced() else _eager)
    return loop(rounds, most, body, state, reads)


def is_read_at_once(x: torch.Tensor) -> bool:
    """Whether the numbers of a tensor can be read now, without waiting for a device: eagerly, on the host."""
    return x.is_cpu and not is_traced()


def _eager(rounds: torch.Tensor, most: int, body: Body, state: State, reads: State) -> State:
    """Python's own loop, which ends with the last round that counts where that is known without waiting for a
    device."""
    return unrolled(rounds, int(rounds) if rounds.is_cpu else most, body, state, reads)


def unrolled(rounds: torch.Tensor, most: int, body: Body, state: State, reads: State) -> State:
    """Python's own loop over all rounds: of eager steps, and of graphs for compilers that know no loops."""
    for number in range(most):
        state = body(torch.full((), number, dtype=torch.int32, device=rounds.device), state, reads)
    return state


def _while_loop(rounds: torch.Tensor, most: int, body: Body, state: State, reads: State) -> State:
    """Loop of torch's own, for graphs of Dynamo."""

    def goes_on(number: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        return number < rounds

    def once(number: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return number + 1, *body(number, state, reads)

    return torch.while_loop(goes_on, once, (torch.zeros_like(rounds), *state))[1:]  # type: ignore[attr-defined]


_is_capturing = False


@contextmanager
def functions_as_one_node() -> Iterator[None]:
    """Makes each ``OneNode`` one node of every graph that Dynamo captures inside the block.

    Such a graph must be run operation by operation, eagerly or lazily; neither Dynamo nor AOTAutograd may trace it
    again.
    """
    global _is_capturing
    before, _is_capturing = _is_capturing, True
    try:
        yield
    finally:
        _is_capturing = before


def is_capturing() -> bool:
    """Whether the process is inside ``functions_as_one_node``."""
    return _is_capturing


class OneNode:
    """Wrapper of a function, which Dynamo takes for one operation inside ``functions_as_one_node``."""

    def __init__(
        self, function: Callable[..., torch.Tensor], result_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Takes the function, and one that makes a tensor of its result's shape from its first argument.

        The first argument is a tensor. The others are tensors, numbers, texts and None, or lists and dicts of these. A
        tensor that the function reads and that is no argument of it would be a constant of the graph.
        """

        def call(first: torch.Tensor, *others: Any) -> torch.Tensor:
            return result_of(first) if isinstance(first, FakeTensor) else function(first, *others)

        self._function = function
        self._call = torch._dynamo.allow_in_graph(call)

    def __call__(self, first: torch.Tensor, *others: Any) -> torch.Tensor:
        return self._call(first, *others) if _is_capturing else self._function(first, *others)
