"""Positions in a prompt with items: rotary positions of its tokens, and spans whose tokens see each other.

Rotary positions are those of models that count an image's height and width separately: M-RoPE (three dimensions) and
XD-RoPE. With M-RoPE a text token at cache position p has the same number in all dimensions, but that number is not p,
because an image takes up fewer positions than it has tokens. With XD-RoPE (HunYuan-VL, four dimensions as a rule) it is
p, and image tokens have p, their column, their row and the number of the image. The graph knows the cache positions, so
rotary positions are sent as offsets from them: one for each token in a mixed step, one for each row in a decode step,
where a request's offset stays the same.

Spans are those of models whose image tokens see each other in both directions (Gemma 3 and 4).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.multimodal.inputs import MultiModalFeatureSpec

from model_runner_base.caches.spans import SentSpans, SpanEnds
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.request_states import RequestStates


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


SEEN = ("image", "video")
"""Modalities whose tokens see each other, as in vLLM and transformers; those of a sound do not."""


class ItemSpans(SentSpans):
    """Bidirectional spans: each is a run of tokens with encoder outputs; text between such runs belongs to none."""

    def __init__(self, requests: RequestStates, in_windows: bool = False) -> None:
        self._requests = requests
        self.in_windows = in_windows

    def of_chunks(self, batch: InputBatch) -> SpanEnds:
        """Finds the spans of the step's chunks.

        Raises RuntimeError for a span whose end is not in the step, since its tokens would see only a part of it.
        """
        decodes = batch.num_decodes
        ends = SpanEnds.none(int(batch.query_len[decodes:].sum()))
        token = 0
        for index, info in enumerate(self._requests.infos_of(batch.rows[decodes:]), decodes):
            begin, count = int(batch.num_computed[index]), int(batch.query_len[index])
            for place in (item.mm_position for item in info.items if item.modality in SEEN):
                if place.offset + place.length <= begin or place.offset >= begin + count:
                    continue
                for first, last in place.extract_embeds_range():
                    if last < begin or first >= begin + count:
                        continue
                    if last >= begin + count:
                        raise RuntimeError(
                            f"tokens {begin} to {begin + count - 1} of request {batch.req_ids[index]} cut an image, "
                            "whose tokens see each other: leave out scheduler_cls"
                        )
                    seen = slice(token + max(first - begin, 0), token + last + 1 - begin)
                    ends.first[seen], ends.last[seen] = first, last
            token += count
        return ends
