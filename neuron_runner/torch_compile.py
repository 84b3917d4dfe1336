"""``compile_backend: "torch.compile"``: every size through torch.compile, with the backend as torch_xla ships it.

The reference that the usual path (``compilation.py``) is compared with, and the fallback should the parts of torch_xla
change that the usual path calls. It is slow: Dynamo and AOTAutograd trace a function again for every size, graphs
compile one after the other, and torch_xla's bridge checks every input again in every call.
"""

from collections.abc import MutableSequence

import torch

from model_runner_base.step.graph_policy import GraphPolicy, StepFunction
from neuron_runner.dynamo import EachSize
from neuron_runner.graph_policy import OpenXlaPolicy


class TorchCompilePolicy(OpenXlaPolicy):
    """Takes openxla's sizes; each is traced and compiled when it is run for the first time, in warm-up."""

    make_ahead = GraphPolicy.make_ahead

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        return EachSize(function, backend="openxla")
