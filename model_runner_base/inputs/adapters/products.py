"""Interface of the products in vLLM's LoRA layers: how they get a step's slots, and how adapters are written."""

from collections.abc import Callable
from typing import Protocol

import torch
from vllm.lora.layers import BaseLayerWithLoRA

from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.adapters.slots import SlotLayer
from model_runner_base.step.graph_policy import WrapFunction

NO_SLOT = -1
"""Slot of a token whose request has no adapter."""


class Products(Protocol):
    """LoRA matmuls of one punica wrapper, which vLLM's LoRA layers call."""

    vocab_size: int
    """Number of rows in an embedding's table."""

    def bind(self, token_slots: torch.Tensor, logits_slots: torch.Tensor) -> None:
        """Binds the slots [T] of the step's tokens and [L] of its rows of logits: int32, ``NO_SLOT`` for no adapter.

        Part of the graph, before the model.
        """

    def unbind(self) -> None:
        """Releases the tensors that ``bind`` computed, which must not outlive the graph's tracing.

        Called when the model has run, its logits included.
        """

    def make_layers(self, wrap: WrapFunction, device_ops: DeviceOps) -> Callable[[BaseLayerWithLoRA], SlotLayer]:
        """Returns a function that wraps one of vLLM's layers, and writes its slots in these products' layout."""
