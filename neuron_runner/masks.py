"""Assignments to what a boolean mask selects, such as ``x[mask] = 0``, in captured graphs.

Lazy tracing turns a mask into the indices at which it is true at that time: right for that mask, and wrong for
every other. ``torch.where`` means the same, and has no shape that depends on data. vLLM's layers of multi-token
prediction have such assignments.
"""

import operator
from typing import Any

import torch
from torch import fx

from neuron_runner.executable import UnsupportedGraphError


def select_by_where(module: fx.GraphModule) -> None:
    """Puts ``torch.where`` in place of each assignment by mask.

    Raises UnsupportedGraphError for one that updates an input or a part of another tensor, or assigns several values.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not operator.setitem or not _is_mask(node.args[1]):
            continue
        target, mask, value = node.args
        example = target.meta["example_value"]
        if target.op == "placeholder" or example._is_view() or isinstance(value, fx.Node):
            raise UnsupportedGraphError(f"{node} assigns by a boolean mask: use torch.where")
        with graph.inserting_before(node):
            for _ in range(example.dim() - mask.meta["example_value"].dim()):
                mask = graph.call_method("unsqueeze", (mask, -1))
            selected = graph.call_function(torch.where, (mask, value, target))
        selected.meta["example_value"] = example
        is_later = _later_than(graph, node)
        target.replace_all_uses_with(selected, delete_user_cb=is_later)
        graph.erase_node(node)
    module.recompile()


def _is_mask(index: Any) -> bool:
    return isinstance(index, fx.Node) and index.meta["example_value"].dtype == torch.bool


def _later_than(graph: fx.Graph, node: fx.Node) -> Any:
    nodes = list(graph.nodes)
    later = set(nodes[nodes.index(node) + 1 :])
    return lambda user: user in later
