"""Rotary positions of models that count height and width of an image apart: M-RoPE, of three dimensions, and XD-RoPE.

With M-RoPE a token of text at cache position p has the same number in all dimensions, but not p: an image takes up
fewer positions than it has tokens. With XD-RoPE (HunYuan-VL, four dimensions as a rule) it is p, and tokens of an image
have p, column, row and the number of the image. So what the model rotates by is sent as an offset from the cache
position, which the graph knows: of each token in a mixed step, of each row in a step of decode, where it is the
request's own number for good.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.multimodal.inputs import MultiModalFeatureSpec


def calc_mrope_positions(
    model: Any, prompt_token_ids: list[int], items: Sequence[MultiModalFeatureSpec]
) -> tuple[np.ndarray, int]:
    """Offsets [D, P] int32 of a prompt's tokens from their cache positions, and the one of all that follow it."""
    if hasattr(model, "get_xdrope_input_positions"):
        positions, delta = model.get_xdrope_input_positions(prompt_token_ids, list(items)), 0
    else:
        positions, delta = model.get_mrope_input_positions(prompt_token_ids, list(items))
    return positions.numpy().astype(np.int32) - np.arange(len(prompt_token_ids), dtype=np.int32), int(delta)
