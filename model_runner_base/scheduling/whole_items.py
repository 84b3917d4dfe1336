"""Images that no step cuts.

Where the tokens of an image see each other, a step has all that is left of an image, or nothing. With
``disable_chunked_mm_input`` vLLM 0.16 keeps to it where a chunk begins before the image, and cuts one that a chunk
begins with, or that a cached prefix ends in.

It goes by the tokens that stand for an encoder's output. The text around them is an item's too, and two items that lie
side by side may share a token of it.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class WholeItems(Scheduler):
    """To be inherited from before ``Scheduler`` or ``AsyncScheduler``."""

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], int, int, list[int]]:
        if self.vllm_config.model_config.is_mm_prefix_lm:
            num_new_tokens = whole_items(request, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(request, num_computed_tokens, num_new_tokens, *args, **kwargs)


def whole_items(request: Request, num_computed: int, num_new: int) -> int:
    """As many of the next ``num_new`` tokens as there are without an image that goes on behind them."""
    stop = num_computed + num_new
    for place in (item.mm_position for item in request.mm_features):
        if max(place.offset, num_computed) < stop < place.offset + place.length:
            for first, last in place.extract_embeds_range():
                if first < stop <= last:
                    return max(first - num_computed, 0)
    return num_new
