"""Rotary positions of models that count an image's height and width separately: M-RoPE (three dimensions) and XD-RoPE.

With M-RoPE a text token at cache position p has the same number in all dimensions, but that number is not p, because an
image takes up fewer positions than it has tokens. With XD-RoPE (HunYuan-VL, four dimensions as a rule) it is p, and
image tokens have p, their column, their row and the number of the image. The graph knows the cache positions, so
rotary positions are sent as offsets from them: one for each token in a mixed step, one for each row in a decode step,
where a request's offset stays the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.multimodal.inputs import MultiModalFeatureSpec


def calc_mrope_positions(
    model: Any, prompt_token_ids: list[int], items: Sequence[MultiModalFeatureSpec]
) -> tuple[np.ndarray, int]:
    """M-RoPE: offsets [3, P] int32 of a prompt's tokens from their cache positions, and that of all later tokens."""
    positions, delta = model.get_mrope_input_positions(prompt_token_ids, list(items))
    return positions.numpy().astype(np.int32) - np.arange(len(prompt_token_ids), dtype=np.int32), int(delta)


def calc_xdrope_positions(
    model: Any, num_dims: int, num_tokens: int, items: Sequence[MultiModalFeatureSpec]
) -> tuple[np.ndarray, int]:
    """XD-RoPE: offsets [num_dims, num_tokens] int32; column, row and image number are the last three dimensions.

    Returns also the offset of all later tokens, 0. An image has one row of tokens for each row of merged patches, with
    one more token a row, and one token before and after the image. vLLM's ``get_xdrope_input_positions`` looks for the
    tokens that begin images, but a text may contain such a token without an image.
    """
    offsets, merged = np.zeros((num_dims, num_tokens), np.int32), model.config.vision_config.spatial_merge_size
    for number, item in enumerate(items):
        assert item.data is not None
        grid: Any = item.data["image_grid_thw"].data
        _, height, width = (int(size) // merged for size in grid)
        rows, columns = np.divmod(np.arange(height * (width + 1), dtype=np.int32), width + 1)
        first = item.mm_position.offset + 1
        end = first + len(rows)
        offsets[-3:, first:end] = np.stack((columns, rows, np.full_like(rows, number))) - np.arange(first, end)
    return offsets, 0
