"""Models that add more of an encoder's output behind each of their first layers (deepstack, Qwen3-VL).

Such an encoder puts out rows of (1 + levels) * H numbers: the embedding first, then what is added behind layer 0, 1 and
so on. vLLM's model keeps these in buffers between two calls, which no graph could hold; here they are a part of the
graph that uses them.
"""

from typing import Any

import torch


class Levels:
    """Takes the place of the model's own buffers."""

    def __init__(self, model: Any) -> None:
        self.count: int = model.deepstack_num_level if getattr(model, "use_deepstack", False) else 0
        """0: the model is of another kind, and nothing is changed."""
        self._bound: dict[str, torch.Tensor] | None = None
        if self.count:
            assert hasattr(model, "_get_deepstack_input_embeds") and hasattr(model, "_clear_deepstack_input_embeds")
            model.deepstack_input_embeds = None
            model._get_deepstack_input_embeds = lambda num_tokens: self._bound
            model._clear_deepstack_input_embeds = lambda num_tokens: None

    def bind(self, beside: torch.Tensor) -> None:
        """[T, levels * H], all levels of a step's tokens. Part of the graph."""
        if self.count:
            self._bound = {f"deepstack_input_embeds_{i}": x for i, x in enumerate(beside.chunk(self.count, 1))}

    def unbind(self) -> None:
        """Nothing that a graph computed outlives its tracing."""
        self._bound = None
