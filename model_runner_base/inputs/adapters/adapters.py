"""Adapters interface: what a runner asks of its model's low-rank adapters; this default has none."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from vllm.lora.request import LoRARequest

from model_runner_base.step.components import StepComponent
from model_runner_base.step.request_states import RequestStates

NOT_ENABLED = "LoRA is not enabled. Use --enable-lora to enable LoRA."
"""Message of vLLM's own LoRA manager."""


class Adapters:
    """Adapters interface; this default has no adapters."""

    # ---- Called by the engine, between two steps ----

    def add(self, request: LoRARequest) -> bool:
        """Loads an adapter unless it is loaded; if it cannot serve, raises ValueError and changes nothing."""
        raise RuntimeError(NOT_ENABLED)

    def remove(self, lora_id: int) -> bool:
        """Forgets an adapter; False if it was not there. A request that still runs with it makes it load again."""
        raise RuntimeError(NOT_ENABLED)

    def pin(self, lora_id: int) -> bool:
        """Keeps an adapter on the host, even if it is not used for a long time."""
        raise RuntimeError(NOT_ENABLED)

    def list(self) -> set[int]:
        """Ids of the adapters on the host."""
        raise RuntimeError(NOT_ENABLED)

    # ---- Called by the runner ----

    def expect(self, request: LoRARequest) -> None:
        """Loads the adapter that an arriving request names; raises ValueError if it cannot serve."""

    def components(self, requests: RequestStates) -> Sequence[StepComponent]:
        """Components that tell the layers each token's adapter; none by default."""
        return ()

    # ---- Logits of some of a step's hidden states, computed after the step ----

    def logits_inputs(self, row: int | None, count: int) -> tuple[np.ndarray, ...]:
        """Further inputs of the graph that computes ``count`` logits rows for the request in ``row``; None as
        ``row`` is padding."""
        return ()

    def bind_logits(self, *inputs: torch.Tensor) -> None:
        """Binds the adapters for the model's head. Part of that graph."""

    def unbind_logits(self) -> None:
        """Releases what ``bind_logits`` bound. Part of that graph."""

    def slots_memory(self) -> int:
        """Bytes of all slots, which are no parameters or buffers of the model."""
        return 0

    def step_memory(self) -> int:
        """Bytes that the largest step needs for adapters, in addition to their slots and to what the model needs."""
        return 0

    def unused(self, num_tokens: int, num_logits: int) -> AbstractContextManager[None]:
        """Context in which the model runs on tokens of no request, before there are steps."""
        return nullcontext()

    def set_aside(self) -> AbstractContextManager[None]:
        """Context in which the model has its own layers, with the names of its checkpoint, for loading weights."""
        return nullcontext()


NO_ADAPTERS = Adapters()
