"""What a runner asks of its model's low-rank adapters; this one has none."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from vllm.lora.request import LoRARequest

from model_runner_base.requests.states import RequestStates
from model_runner_base.step.components import StepComponent

NOT_ENABLED = "LoRA is not enabled. Use --enable-lora to enable LoRA."
"""vLLM's words."""


class Adapters:
    """The model takes none."""

    # ---- What the engine asks, between two steps ----

    def add(self, request: LoRARequest) -> bool:
        """Loads an adapter unless it is there; raises ValueError, and changes nothing, where it cannot serve."""
        raise RuntimeError(NOT_ENABLED)

    def remove(self, lora_id: int) -> bool:
        """Forgets an adapter; False if it was not there. A request that still runs with it has it loaded again."""
        raise RuntimeError(NOT_ENABLED)

    def pin(self, lora_id: int) -> bool:
        """Keeps an adapter on the host, however long nobody uses it."""
        raise RuntimeError(NOT_ENABLED)

    def list(self) -> set[int]:
        """The ids of those on the host."""
        raise RuntimeError(NOT_ENABLED)

    # ---- The runner's own ----

    def expect(self, request: LoRARequest) -> None:
        """Loads what an arriving request names; raises ValueError where it cannot serve."""

    def components(self, requests: RequestStates) -> Sequence[StepComponent]:
        """Components that tell the layers each token's adapter."""
        return ()

    # ---- Logits that are computed behind a step, of some of its hidden states ----

    def beside_logits(self, row: int | None, count: int) -> tuple[np.ndarray, ...]:
        """Further inputs of the graph of ``count`` rows of logits, all of the request in ``row``; None: padding."""
        return ()

    def bind_logits(self, *beside: torch.Tensor) -> None:
        """Sets what the model's head is called with. Part of that graph."""

    def unbind_logits(self) -> None:
        """Lets go of what ``bind_logits`` set. Part of that graph."""

    def step_memory(self) -> int:
        """Bytes that the largest step needs for adapters, beside their slots and what the model itself needs."""
        return 0

    def unused(self, num_tokens: int, num_logits: int) -> AbstractContextManager[None]:
        """Within it the model runs on tokens of no request, before there are steps."""
        return nullcontext()

    def set_aside(self) -> AbstractContextManager[None]:
        """Within it the model's layers are as its checkpoint names them, for loading weights."""
        return nullcontext()


NO_ADAPTERS = Adapters()
