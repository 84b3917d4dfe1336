"""Models that add more of an encoder's output behind each of their first layers (deepstack, Qwen3-VL).

Such an encoder puts out rows of (1 + levels) * H numbers: the embedding first, then what is added behind layer 0, 1 and
so on. vLLM's model keeps these in buffers between two calls, which no graph could hold; here they are a part of the
graph that uses them.
"""

from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.sequence import IntermediateTensors

from model_runner_base.device_ops import DeviceOps


class Levels:
    """Takes the place of the model's own buffers."""

    def __init__(self, model: Any, model_config: ModelConfig, device_ops: DeviceOps) -> None:
        self.count: int = model.deepstack_num_level if getattr(model, "use_deepstack", False) else 0
        """0: the model is of another kind, and nothing is changed."""
        self._hidden_size = model_config.get_inputs_embeds_size()
        self._dtype: Any = model_config.dtype
        self._device_ops = device_ops
        self._bound: IntermediateTensors | None = None
        if self.count:
            assert hasattr(model, "_get_deepstack_input_embeds") and hasattr(model, "_clear_deepstack_input_embeds")
            model.deepstack_input_embeds = None
            model._get_deepstack_input_embeds = self._of_call
            model._clear_deepstack_input_embeds = lambda num_tokens: None

    def bind(self, beside: torch.Tensor) -> None:
        """[T, levels * H], all levels of a step's tokens. Part of the graph."""
        if self.count:
            levels = enumerate(beside.chunk(self.count, 1))
            self._bound = IntermediateTensors({f"deepstack_input_embeds_{i}": level for i, level in levels})

    def unbind(self) -> None:
        """Nothing that a graph computed outlives its tracing."""
        self._bound = None

    def _of_call(self, num_tokens: int) -> IntermediateTensors | None:
        """What the model adds in this call; in one without images zeros, where calls have to be alike."""
        if self._bound is None and self._device_ops.calls_alike:
            zeros = self._device_ops.zeros((num_tokens, self._hidden_size), self._dtype)
            return IntermediateTensors({f"deepstack_input_embeds_{i}": zeros for i in range(self.count)})
        return self._bound
