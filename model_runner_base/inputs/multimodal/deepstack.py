"""Models that add further parts of an encoder's output after each of their first layers (deepstack, Qwen3-VL).

Such an encoder's output has rows of (1 + levels) * H numbers: first the embedding, then the levels, which are added
after layer 0, 1 and so on. vLLM's model keeps the levels in buffers between two calls, but a graph cannot. Here they
are a part of the graph that uses them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.sequence import IntermediateTensors

from model_runner_base.device_ops import DeviceOps


class DeepstackBuffers:
    """Replaces the model's own buffers of levels.

    If calls must be alike (``DeviceOps.calls_alike``), each level has a buffer here whose address does not change. What
    was compiled or captured in one call then reads it in all calls. A call without images finds zeros there.
    """

    def __init__(self, model: Any, model_config: ModelConfig, max_num_tokens: int, device_ops: DeviceOps) -> None:
        self.count: int = model.deepstack_num_level if getattr(model, "use_deepstack", False) else 0
        """Number of levels; 0 for a model without deepstack, of which nothing is changed."""
        dims = max_num_tokens, model_config.get_inputs_embeds_size()
        dtype: Any = model_config.dtype
        num_held = self.count if device_ops.calls_alike else 0
        self._held = [device_ops.zeros(dims, dtype) for _ in range(num_held)]
        self._bound: IntermediateTensors | None = None
        if self.count:
            assert hasattr(model, "_get_deepstack_input_embeds") and hasattr(model, "_clear_deepstack_input_embeds")
            model.deepstack_input_embeds = None
            model._get_deepstack_input_embeds = self._of_call
            model._clear_deepstack_input_embeds = lambda num_tokens: None

    def bind(self, embeddings: torch.Tensor) -> None:
        """Binds ``embeddings`` [T, levels * H], all levels of a step's tokens. Part of the graph."""
        if self.count:
            levels = embeddings.chunk(self.count, 1)
            if self._held:
                levels = tuple(held[: len(x)].copy_(x) for held, x in zip(self._held, levels, strict=True))
            self._bound = _named(levels)

    def unbind(self) -> None:
        """Releases the levels, since no tensor of a graph may outlive its tracing."""
        self._bound = None

    def _of_call(self, num_tokens: int) -> IntermediateTensors | None:
        """Levels that the model adds in this call; None for none."""
        if self._bound is None and self._held:
            return _named([held[:num_tokens].zero_() for held in self._held])
        return self._bound


def _named(levels: Sequence[torch.Tensor]) -> IntermediateTensors:
    return IntermediateTensors({f"deepstack_input_embeds_{level}": x for level, x in enumerate(levels)})
