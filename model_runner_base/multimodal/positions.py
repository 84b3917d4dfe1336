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
    """M-RoPE: offsets [3, P] int32 of a prompt's tokens from their cache positions, and that of all behind it."""
    positions, delta = model.get_mrope_input_positions(prompt_token_ids, list(items))
    return positions.numpy().astype(np.int32) - np.arange(len(prompt_token_ids), dtype=np.int32), int(delta)


def calc_xdrope_positions(
    model: Any, num_dims: int, num_tokens: int, items: Sequence[MultiModalFeatureSpec]
) -> tuple[np.ndarray, int]:
    """The same of XD-RoPE, [num_dims, num_tokens]: column, row and number of the image come last.

    An image has a row of tokens for each row of its merged patches, one longer than those, between two tokens more.
    vLLM's ``get_xdrope_input_positions`` goes by the tokens that begin images, which a text may have without one.
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
