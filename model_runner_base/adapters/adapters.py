"""What a runner asks of its model's low-rank adapters; this one has none."""

from contextlib import AbstractContextManager, nullcontext

from vllm.lora.request import LoRARequest

from model_runner_base.inputs.tokens import TokenInputs
from model_runner_base.requests.states import RequestStates

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

    def beside(self, inputs: TokenInputs, requests: RequestStates) -> TokenInputs:
        """What a step's graph is given: these inputs, and what tells the adapters of its tokens."""
        return inputs

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
