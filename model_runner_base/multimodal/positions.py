"""Rotary positions of models that count height and width of an image apart (M-RoPE).

A token of text at cache position p has the same number in all three dimensions, but not p: an image takes up fewer
positions than it has tokens. So what the model rotates by is sent as an offset from the cache position, which the graph
knows: of each token in a mixed step, of each row in a step of decode, where it is the request's own number for good.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.multimodal.inputs import MultiModalFeatureSpec


def calc_mrope_positions(
    model: Any, prompt_token_ids: list[int], items: Sequence[MultiModalFeatureSpec]
) -> tuple[np.ndarray, int]:
    """Offsets [3, P] int32 of a prompt's tokens from their cache positions, and the one of all that follow it."""
    positions, delta = model.get_mrope_input_positions(prompt_token_ids, list(items))
    return positions.numpy().astype(np.int32) - np.arange(len(prompt_token_ids), dtype=np.int32), int(delta)
