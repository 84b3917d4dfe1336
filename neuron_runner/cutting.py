"""Graphs that are cut in pieces: at their collectives, which the host runs, and between large layers.

Where collectives cannot be part of an XLA graph (``communicator.py``), a captured graph becomes a sequence of pieces.
At each size every piece is an executable of its own, over a list of values: the tensors given to the function, its
state, and what crosses from piece to piece. State is donated piece by piece, and its place in the list holds the newest
tensor, so a cache that several pieces update is right in each.

Layers that are alike make graphs that are alike: XLA compiles one. So a model of many layers is compiled in the time of
a few, for some 0.1 ms of the host in each layer and step. Cuts between layers are made where a layer's weights are so
large that reading them takes many times that.

What crosses is a copy. So a piece may update in place what it made itself, its state, and a collective's result that
no other piece reads. Updates of other crossing values are refused by ``Executable``, which checks what it is given;
views of state that cross a collective are refused here. A graph that would do either between layers is not cut there.
"""

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from neuron_runner.communicator import OPERATORS
from neuron_runner.executable import Compiler, Executable, UnsupportedGraphError, contents_of, zeros

LARGE_LAYER = 8 << 20
"""Bytes of a layer's weights from which on a graph is cut between layers: reading them takes a CPU about 1 ms."""
_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imatmul", "ipow", "setitem"}
_CHILD = re.compile(r"\['\d+'\]$")
"""End of Dynamo's name of a module in a list of modules."""


def is_collective(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in OPERATORS


def starts_of_pieces(
    graph: fx.GraphModule, weights: dict[fx.Node, torch.Tensor], state_inputs: list[int]
) -> set[fx.Node]:
    """Nodes of a captured graph at which a piece begins; none if it stays whole.

    ``weights`` are the values of inputs that are the same in all calls; ``state_inputs`` are indices of the inputs that
    are donated. Raises UnsupportedGraphError if a view of the state is made before a collective and used after it.
    """
    collectives = set(filter(is_collective, graph.graph.nodes))
    collectives |= {node.next for node in collectives}
    view = _view_across(graph, state_inputs, collectives)
    if view is not None:
        raise UnsupportedGraphError(
            f"{view} is a view of state that is used on both sides of a collective: take it anew after that"
        )
    layers = _starts_of_layers(graph)
    in_layers = sum(tensor.nbytes for node, tensor in weights.items() if any(map(_layer_of, node.users)))
    num_layers = len(set(filter(None, map(_layer_of, layers))))
    is_worth_it = num_layers > 1 and in_layers >= LARGE_LAYER * num_layers
    can_be_cut = _view_across(graph, state_inputs, layers) is None and not _updates_across(graph, layers)
    return collectives | layers if is_worth_it and can_be_cut else collectives


def _starts_of_layers(graph: fx.GraphModule) -> set[fx.Node]:
    """Nodes at which one of a model's layers begins, or what follows the last one."""
    starts, current = set(), None
    for node in graph.graph.nodes:
        if node.op != "placeholder" and node.meta.get("nn_module_stack") and _layer_of(node) != current:
            starts.add(node)
            current = _layer_of(node)
    return starts


def _layer_of(node: fx.Node) -> str | None:
    """Dynamo's name of the layer that a node is part of: the outermost module of a list; None if there is none."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in stack.values() if _CHILD.search(path)), None)


def _updates_across(graph: fx.GraphModule, starts: set[fx.Node]) -> bool:
    """Whether a piece would update in place what another one has made, as layers do that add to their own input."""
    given = set(map(_storage, graph.graph.find_nodes(op="placeholder")))
    made_in: dict[int | None, int] = {}
    piece = 0
    for node in graph.graph.nodes:
        piece += node in starts
        updated = _storage(node.args[0]) if _is_update(node) else None
        if updated is not None and updated not in given and made_in.get(updated, piece) != piece:
            return True
        made_in.setdefault(_storage(node), piece)
    return False


def _is_update(node: fx.Node) -> bool:
    """Whether a node updates its first argument in place: ``add_``, ``iadd`` and the like."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _storage(node: Any) -> int | None:
    example = _example(node) if isinstance(node, fx.Node) else None
    return example.untyped_storage()._cdata if isinstance(example, torch.Tensor) else None


def _view_across(graph: fx.GraphModule, state_inputs: list[int], starts: set[fx.Node]) -> fx.Node | None:
    """A view of the state that is made in one piece and used in another; None if there is none."""
    nodes = list(graph.graph.nodes)
    storages = {_storage(nodes[index]) for index in state_inputs}
    cuts = [index for index, node in enumerate(nodes) if node in starts]
    order = {node: index for index, node in enumerate(nodes)}
    for node in nodes:
        if node.op != "placeholder" and _storage(node) in storages:
            last_use = max((order[user] for user in node.users), default=0)
            if any(order[node] < cut <= last_use for cut in cuts):
                return node
    return None


def donate(module: fx.GraphModule, state_inputs: list[int]) -> None:
    """Makes in-place state functional: clones each state input, returns the clones first, and donates the inputs."""
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    clones = [_update_a_clone(graph, placeholders[index]) for index in state_inputs]
    for index, clone in zip(state_inputs, clones, strict=True):
        with graph.inserting_after(clone):
            graph.call_function(torch.ops.xla.dynamo_set_buffer_donor_, (placeholders[index], True))
    output = graph.output_node()
    (results,) = output.args
    output.args = ((*clones, *results),)  # type: ignore[misc]
    module.recompile()


def _update_a_clone(graph: fx.Graph, placeholder: fx.Node) -> fx.Node:
    """Lets the graph read and update a clone of an input, which costs nothing under lazy tracing."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        clone = graph.call_method("clone", (placeholder,))
    placeholder.replace_all_uses_with(clone, delete_user_cb=lambda user: user is not clone)
    return clone


@dataclass
class _Call:
    """A call of the cut graph: a piece, or one collective."""

    module: fx.GraphModule
    inputs: list[fx.Node]
    """Nodes of the cut graph, like ``outputs`` and ``state``."""
    outputs: list[fx.Node]
    state: list[fx.Node]
    collective: "_Collective | None"


class CutGraph:
    """A captured graph in pieces, to be compiled at any size."""

    def __init__(self, graph: fx.GraphModule, state_inputs: list[int], starts: set[fx.Node]) -> None:
        """``state_inputs``: indices of the graph's inputs that are donated; ``starts``: where pieces begin."""
        cut = _split(graph, starts)
        self._inputs = cut.graph.find_nodes(op="placeholder")
        self._state = [self._inputs[index] for index in state_inputs]
        self._outputs: list[fx.Node] = list(cut.graph.output_node().args[0])  # type: ignore[arg-type]
        nodes = cut.graph.find_nodes(op="call_module")
        self._calls = [self._call(node, cut.get_submodule(node.target)) for node in nodes]
        self._finish()

    def _call(self, node: fx.Node, module: Any) -> _Call:
        output = module.graph.output_node()
        outputs = [node]
        if isinstance(output.args[0], tuple | list):
            by_index = {user.args[1]: user for user in node.users}
            outputs = [by_index[index] for index in range(len(output.args[0]))]
        else:
            output.args = ((output.args[0],),)
            module.recompile()
        inputs: Any = list(node.args)
        for each in filter(is_collective, module.graph.nodes):
            source = inputs[module.graph.find_nodes(op="placeholder").index(each.args[0])]
            return _Call(module, [source], outputs, [], _Collective(each.target, each.args[1:]))
        return _Call(module, inputs, outputs, [each for each in inputs if each in self._state], None)

    def _finish(self) -> None:
        """Makes the pieces' updates in place functional."""
        gathered = {call.outputs[0] for call in self._calls if call.collective}
        for call in self._calls:
            if call.collective:
                continue
            placeholders = call.module.graph.find_nodes(op="placeholder")
            for source, placeholder in zip(call.inputs, placeholders, strict=True):
                if source in gathered and len(source.users) == 1:
                    _update_a_clone(call.module.graph, placeholder)
            donate(call.module, [call.inputs.index(node) for node in call.state])

    def at(self, compiler: Compiler, arguments: list[Any], varying: dict[int, int], num_given: int) -> "CutExecutable":
        """Compiles the pieces, as ``Compiler.make`` does a graph; a run is given ``num_given`` tensors."""
        values: dict[fx.Node, Any] = dict(zip(self._inputs, arguments, strict=True))
        place = {self._inputs[index]: given for index, given in varying.items()}
        steps: list[_Piece | _HostCollective] = []
        for call in self._calls:
            given = [values[node] for node in call.inputs]
            new: list[Any]
            if call.collective:
                new = [call.collective.stand_in(*given)]
            else:
                traced = _Traced(call.module)
                at = {index: place[node] for index, node in enumerate(call.inputs) if node in place}
                executable = compiler.make(traced, given, at)
                new = traced.with_stand_ins(executable, len(call.state))
            values.update(zip(call.outputs, new, strict=True))
            crossing = [node for node in call.outputs if isinstance(values[node], torch.Tensor)]
            place.update({node: num_given + index for index, node in enumerate(crossing)})
            num_given += len(crossing)
            into = [place[node] for node in (*call.state, *crossing)]
            if call.collective:
                steps.append(_HostCollective(call.collective, [place[call.inputs[0]]], *into))
            else:
                steps.append(_Piece(executable, list(at.values()), into))
        outputs = [*self._state, *self._outputs]
        examples = [values[node] for node in outputs]
        if len(set(outputs)) < len(outputs) or any(node in self._inputs for node in self._outputs):
            raise UnsupportedGraphError("a compiled function may return nothing twice, and no input: return a clone")
        return CutExecutable(steps, [place[node] for node in outputs], num_given, examples)


class CutExecutable:
    """A cut graph at one size; used as an ``Executable``."""

    def __init__(
        self, steps: "list[_Piece | _HostCollective]", results: list[int], num_places: int, examples: list[torch.Tensor]
    ) -> None:
        self._steps = steps
        self._results = results
        self._num_places = num_places
        self._shapes = [(example.shape, example.dtype) for example in examples]
        last_reader = {place: index for index, step in enumerate(steps) for place in step.reads}
        self._done: list[list[int]] = [[] for _ in steps]
        """Places by step that no later step reads: they are emptied, so that memory does not grow with depth."""
        for place in last_reader.keys() - set(results):
            self._done[last_reader[place]].append(place)

    def stand_ins(self, start: int) -> list[torch.Tensor]:
        """Zeros in place of a run's results from ``start`` on."""
        return [zeros(shape, dtype) for shape, dtype in self._shapes[start:]]

    def run(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Launches pieces and collectives in turn; returns when the last piece is on its way."""
        values: list[Any] = [*given, *(None for _ in range(self._num_places - len(given)))]
        for step, done in zip(self._steps, self._done, strict=True):
            step.run(values)
            for place in done:
                values[place] = None
        return [values[place] for place in self._results]


@dataclass
class _Piece:
    executable: Executable
    reads: list[int]
    into: list[int]

    def run(self, values: list[Any]) -> None:
        for place, result in zip(self.into, self.executable.run(values), strict=True):
            values[place] = result


@dataclass
class _Collective:
    """An operator and its arguments after the tensor."""

    operator: Any
    arguments: tuple[Any, ...]

    def stand_in(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros on the device with the shape and dtype of the result."""
        result = self.operator(x.to("meta"), *self.arguments)
        return zeros(result.shape, result.dtype)

    def on_host(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the operator on the host: waits for a tensor on the device, and returns the result on the device."""
        return self.operator(x.cpu(), *self.arguments).to(x.device)


@dataclass
class _HostCollective:
    collective: _Collective
    reads: list[int]
    into: int

    def run(self, values: list[Any]) -> None:
        (source,) = self.reads
        values[self.into] = self.collective.on_host(values[source])


class _Traced:
    """A piece that returns only its tensors, as an executable has to, and remembers the sizes among its results."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._results: list[Any] = []

    def __call__(self, *arguments: Any) -> list[torch.Tensor]:
        self._results = list(self._module(*arguments))
        known = {contents_of(x) for x in arguments if isinstance(x, torch.Tensor)}
        # A result that is a mere view of an argument, such as all of its columns, crosses as a copy of its own.
        tensors = [x for x in self._results if isinstance(x, torch.Tensor)]
        return [x.clone() if contents_of(x) in known else x for x in tensors]

    def with_stand_ins(self, executable: Executable, start: int) -> list[Any]:
        """The traced results from ``start`` on, the first that is no state, with zeros in place of tensors.

        The traced tensors are dropped.
        """
        stand_ins = iter(executable.stand_ins(start))
        results, self._results = self._results[start:], []
        return [next(stand_ins) if isinstance(x, torch.Tensor) else x for x in results]


def _split(graph: fx.GraphModule, starts: set[fx.Node]) -> fx.GraphModule:
    """Splits a graph into submodules, each a piece or a collective, in the order of the graph."""
    number_of: dict[fx.Node, int] = {}
    current = 0
    for node in graph.graph.nodes:
        source = node.args[0] if node.target is operator.getitem else None
        current += node in starts
        if isinstance(source, fx.Node) and isinstance(_example(source), tuple | list):
            number_of[node] = number_of[source]  # An element of a tuple: tuples do not cross.
        else:
            number_of[node] = current
    # The order matters: pieces update in place.
    return split_module(graph, graph, number_of.__getitem__, keep_original_order=True)


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")
