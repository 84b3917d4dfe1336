"""Buffers that keep the model's inputs at fixed addresses, where captured graphs (vLLM's piecewise ones too) read."""

from typing import Any

import torch
from torch import nn


class StaticInputs:
    """A hook before a model's forward: copies ids, positions and embeddings into buffers of the largest step.

    Positions become int64 on the way, as CUDA's rotary kernels want them. They may be [D, T] (M-RoPE). Their buffer is
    one longer than any step, so that a slice of it has the same strides in every call: the first call's are compiled
    in.
    """

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        self._max_num_tokens = max_num_tokens
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: self._held(name, value) for name, value in kwargs.items()}

    def _held(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_positions = name == "positions"
        if name not in self._buffers:
            dtype = torch.int64 if is_positions else value.dtype
            most = self._max_num_tokens
            shape = (*value.shape[:-1], most + 1) if is_positions else (most, *value.shape[1:])
            with torch.inference_mode(False):  # Compiled code may be called with them outside inference mode, too.
                self._buffers[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        buffer = self._buffers[name]
        held = buffer[..., : value.shape[-1]] if is_positions else buffer[: len(value)]
        return held.copy_(value)
