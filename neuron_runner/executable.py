"""A captured graph at one size: traced lazily, compiled by XLA, run by openxla's cached-graph call.

The bridge of ``torch.compile(backend="openxla")`` (``torch_xla._dynamo.dynamo_bridge``) does this for graphs of every
kind and asks on each call which kind it has. Here a graph is checked once, when it is traced, and a call fills the
inputs that vary into a list that holds the weights already.

XLA compiles without Python's lock and without the device's, as long as every input of a graph has contents (torch_xla's
own placeholder tensors would take the device's lock). So graphs are compiled while others are traced.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch_xla
from torch_xla import _XLAC

from model_runner_base.step.rounds import loops_run_by
from neuron_runner.loops import loop_of_device
from neuron_runner.metrics import num_lowered


class UnsupportedGraphError(RuntimeError):
    """A function does something that cannot be part of a graph."""


class Executable:
    """One size of a graph: traced by the constructor, compiled once by ``compile``, then run any number of times."""

    def __init__(
        self, graph: Callable[..., Sequence[torch.Tensor]], arguments: list[Any], varying: dict[int, int]
    ) -> None:
        """``arguments``: numbers, weights, and examples of what varies from run to run.

        ``varying`` says for the index of each example which of the tensors given to ``run`` takes its place.
        """
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        contents = [contents_of(x) for x in tensors]
        if any(contents.count(contents_of(arguments[i])) > 1 for i in varying):
            raise UnsupportedGraphError("a compiled function may not be given a tensor twice: give it a clone")
        with loops_run_by(loop_of_device()):
            outputs = list(graph(*arguments))
        _check(tensors, outputs)
        place_of = {_XLAC._xla_get_tensor_id(x): i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
        ids, values = _XLAC._get_tensors_xla_device_data_node(outputs)
        if _XLAC._get_seed_info_id() in ids:
            raise UnsupportedGraphError("a compiled function may not draw from torch's random generator")
        places = [place_of.get(tensor_id) for tensor_id in ids]
        # Weights are the model's own tensors here, so that reloaded ones count. Constants that tracing made are kept by
        # value. What varies is None, and is filled in for a run.
        self._inputs = [
            value if place is None else None if place in varying else arguments[place]
            for value, place in zip(values, places, strict=True)
        ]
        self._filled = [(i, varying[place]) for i, place in enumerate(places) if place in varying]
        self.hash = _XLAC._get_graph_hash(outputs)
        self._traced = outputs
        self._results = [(output.shape, output.dtype) for output in outputs]

    def compile(self) -> None:
        """Has XLA compile the graph; other threads may trace or compile at the same time."""
        try:
            _XLAC._xla_warm_up_cache(self._traced, [])
        finally:
            self._traced.clear()  # A sync would run it.

    def forgo_compilation(self) -> None:
        """Takes the graph that was compiled for an executable of the same hash."""
        self._traced.clear()

    def stand_ins(self, start: int) -> list[torch.Tensor]:
        """Zeros in place of a run's results from ``start`` on."""
        return [zeros(shape, dtype) for shape, dtype in self._results[start:]]

    def run(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Launches the graph."""
        inputs = self._inputs.copy()
        for position, index in self._filled:
            inputs[position] = given[index]
        return _XLAC._run_cached_graph(self.hash, inputs)


def _check(inputs: list[torch.Tensor], outputs: list[Any]) -> None:
    """Raises UnsupportedGraphError for what the bridge would mend on every call."""
    if not all(isinstance(output, torch.Tensor) and output.device.type == "xla" for output in outputs):
        raise UnsupportedGraphError("a compiled function may return nothing but tensors on the device")
    if any(_XLAC._check_tensor_need_materialization(inputs)):
        raise UnsupportedGraphError("a compiled function may update nothing in place but its state")
    is_input = {id(x) for x in inputs} & {id(x) for x in outputs}
    if is_input or len({contents_of(x) for x in outputs}) < len(outputs):
        raise UnsupportedGraphError("a compiled function may return nothing twice, and no input: return a clone")


def contents_of(tensor: torch.Tensor) -> int:
    """A number for the contents of a tensor: the same for tensors that share them, such as a view of all columns."""
    return _XLAC._unique_id_for_ir_and_data(tensor)


def zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the device, with contents of their own."""
    return torch.zeros(shape, dtype=dtype).to(torch_xla.device())


class Uncompiled:
    """Counts this process's graphs that were traced while it serves and are not compiled yet; holds back syncs.

    ``torch_xla.sync`` runs everything that is traced, with buffers that a step may have donated since. So a sync waits
    until there are no such graphs, and none is traced before it has ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @contextmanager
    def another(self) -> Iterator[None]:
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def sync(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._count)
            torch_xla.sync()


UNCOMPILED = Uncompiled()


class Compiler:
    """Compiles executables: one at a time, several within ``ahead``, or while steps run within ``in_background``."""

    WIDTH = min(8, os.cpu_count() or 1)
    """Compilations at a time. XLA's own threads share the cores between all of them."""

    def __init__(self) -> None:
        self.states: list[Sequence[torch.Tensor]] = []
        self._compilations: dict[bytes, Future[None]] = {}
        """Compilation by hash of the graph; torch_xla keeps one graph for executables of equal hashes."""
        self._submit: Callable[[Callable[[], None]], None] | None = None
        self._awaited: list[Future[None]] = []
        """Compilations that the present ``ahead`` or ``in_background`` waits for."""
        # torch_xla's switch for donated inputs is one for all threads, and is read while a thread compiles.
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)

    @property
    def num_graphs(self) -> int:
        """Number of different graphs that were made."""
        return len(self._compilations)

    @property
    def is_ahead(self) -> bool:
        """Whether executables are only compiled at present, not run."""
        return self._submit is not None

    def undonated(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or zeros like it where it is the state of any function.

        Tracing a function marks its state as donated. A graph that only reads the tensor must not see the mark, and may
        be compiling when it is made.
        """
        is_state = any(tensor is other for state in self.states for other in state)
        return zeros(tensor.shape, tensor.dtype) if is_state else tensor

    def make(self, *arguments: Any) -> Executable:
        """Makes ``Executable(*arguments)``. It is compiled now, unless ``ahead`` or ``in_background`` is active."""
        executable = Executable(*arguments)
        known = self._compilations.get(executable.hash)
        if known is not None and known.done() and (known.cancelled() or known.exception()):
            known = None
        if known is not None:
            executable.forgo_compilation()
            if self._submit:
                self._awaited.append(known)
            else:
                known.result()
        elif self._submit:
            self._submit(executable.compile)
            self._compilations[executable.hash] = self._awaited[-1]
        else:
            executable.compile()
            self._compilations[executable.hash] = Future()
            self._compilations[executable.hash].set_result(None)
        return executable

    @contextmanager
    def _submitting(
        self, submit: Callable[[Callable[[], None]], None], futures: "list[Future[None]]"
    ) -> Iterator[None]:
        """``submit`` appends the compilation to ``futures``."""
        self._submit, self._awaited = submit, futures
        try:
            yield
        finally:
            self._submit, self._awaited = None, []

    @contextmanager
    def ahead(self) -> Iterator[list[Future[None]]]:
        """A context in which nothing is run; when it ends, everything that was traced in it is compiled.

        Yields the list of compilations so far. Nothing may call ``torch_xla.sync`` in it: that would run what was
        traced.
        """
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(self.WIDTH) as pool:

            def submit(task: Callable[[], None]) -> None:
                for future in futures:
                    if future.done():
                        future.result()  # What went wrong ends the phase now, not when all is traced.
                futures.append(pool.submit(task))

            try:
                with self._submitting(submit, futures):
                    yield futures
                for future in futures:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    @contextmanager
    def in_background(self) -> Iterator[list[Future[None]]]:
        """A context in which nothing is run, and what is traced begins to be compiled, at low priority.

        Yields the list of compilations so far. When it ends, the compilations need nothing more of the tensors that
        were given: steps may donate them.
        """
        futures: list[Future[None]] = []

        def submit(task: Callable[[], None]) -> None:
            future: Future[None] = Future()
            before = num_lowered()
            futures.append(future)
            thread = threading.Thread(target=_compile_in_background, args=(task, future), name="compile-in-background")
            thread.start()
            while not future.done() and num_lowered() == before:
                time.sleep(0.0005)
            _lower_priority(thread)

        with UNCOMPILED.another(), self._submitting(submit, futures):
            yield futures


def _lower_priority(thread: threading.Thread) -> None:
    """Lets steps go first, as far as XLA compiles on this thread. On Linux a thread has a priority of its own."""
    with suppress(OSError):  # It may have ended.
        number = thread.native_id or 0
        os.setpriority(os.PRIO_PROCESS, number, max(10, os.getpriority(os.PRIO_PROCESS, number)))


def _compile_in_background(task: Callable[[], None], future: "Future[None]") -> None:
    with UNCOMPILED.another():
        try:
            task()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
