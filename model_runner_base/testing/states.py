"""States of recurrent layers: those in the runner's tensors, and what HF transformers keeps after the same tokens.

The reference computes all tokens of a request at once, from the first one on, and shares no code with the runner.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_runner_base.testing.models import TinyModel, reference_model
from model_runner_base.testing.precision import PRECISION
from model_runner_base.vllm_compat.types.recurrent import recurrent_layers

States = dict[int, list[np.ndarray]]
"""Inputs of the convolution [K - 1, D], and the state of the recurrence, by the number of the layer."""


def states_in(runner: Any, index: int) -> States:
    """States at an ``index`` of the runner's tensors."""
    states = {}
    for name, layer in recurrent_layers(runner.vllm_config).items():
        cache = layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache
        parts = [cache] if isinstance(cache, torch.Tensor) else cache
        number = next(int(part) for part in name.split(".") if part.isdecimal())
        states[number] = [runner.device_ops.to_host(part[index].float()).copy() for part in parts]
    return states


@torch.no_grad()
def expected_states(model: TinyModel, tokens: Sequence[int]) -> States:
    """States after ``tokens`` of a model with gated delta nets, by HF transformers."""
    PRECISION.require_exact("states of recurrent layers")
    out = reference_model(model.path)(torch.tensor([list(tokens)]), use_cache=True)
    cache, states = out.past_key_values, {}
    kinds = reference_model(model.path).config.layer_types
    for number in [at for at, kind in enumerate(kinds) if kind == "linear_attention"]:
        if hasattr(cache, "layers"):  # Newer releases of transformers.
            conv, recurrence = cache.layers[number].conv_states[0], cache.layers[number].recurrent_states[0]
        else:
            conv, recurrence = cache.conv_states[number], cache.recurrent_states[number]
        # Transformers keeps one input more than the next token reads.
        states[number] = [conv[0, :, 1:].T.numpy(), recurrence[0].numpy()]
    return states
