"""``compile_backend: "torch.compile"``: every size through torch.compile, with the backend as torch_xla ships it.

The reference that the usual path (``compilation.py``) is held against, and what is left should the bridge below it
change. It is slow: Dynamo and AOTAutograd trace a function anew for every size, graphs compile one after the other, and
torch_xla's bridge looks at every input again in every call.
"""

from collections.abc import MutableSequence

import torch

from model_runner_base.graphs.policy import GraphPolicy, StepFunction
from neuron_runner.dynamo import EachSize
from neuron_runner.graph_policy import OpenXlaPolicy


class TorchCompilePolicy(OpenXlaPolicy):
    """The sizes of openxla; each is traced and compiled when it is run for the first time, in warm-up."""

    make_ahead = GraphPolicy.make_ahead

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        return EachSize(function, backend="openxla")
