"""Keeps images whole whose tokens see each other: no step cuts such an image.

A step has all remaining tokens of such an image, or none. With ``disable_chunked_mm_input``, vLLM 0.16 does the same
where a chunk begins before the image. It cuts an image at which a chunk begins, or in which a cached prefix ends.

Only tokens with encoder outputs count. The text around them belongs to the item, too, and two adjacent items may share
one of its tokens.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class BidirectionalImages(Scheduler):
    """Mixin that keeps such images whole, listed before ``Scheduler`` or ``AsyncScheduler`` among the bases."""

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        if self.vllm_config.model_config.is_mm_prefix_lm:
            num_new_tokens = without_cut_image(request, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(request, num_computed_tokens, num_new_tokens, *args, **kwargs)


def without_cut_image(request: Request, num_computed: int, num_new: int) -> int:
    """Number of the next ``num_new`` tokens that a step may have without cutting an image."""
    stop = num_computed + num_new
    for place in (item.mm_position for item in request.mm_features):
        if max(place.offset, num_computed) < stop < place.offset + place.length:
            for first, last in place.extract_embeds_range():
                if first < stop <= last:
                    return max(first - num_computed, 0)
    return num_new
