"""Encoders as graphs, on devices that have such (``DeviceOps.towers_as_graphs``)."""

from collections.abc import Sequence

from vllm.multimodal.inputs import MultiModalFeatureSpec


def check_rows(item: MultiModalFeatureSpec, count: int) -> None:
    """Raises RuntimeError unless ``count`` embeddings are as many as the item's tokens: the scheduler counts those."""
    if count != item.mm_position.get_num_embeds():
        raise RuntimeError(
            f"the encoder made {count} embeddings of a {item.modality} that stands for "
            f"{item.mm_position.get_num_embeds()} tokens"
        )


class EncoderGraphs:
    """There are none: the model's towers run eagerly."""

    def encode(self, items: Sequence[MultiModalFeatureSpec]) -> Sequence[MultiModalFeatureSpec]:
        """Makes the rows of those items that graphs can, in the pool; returns the others."""
        return items

    def step_memory(self) -> int:
        """Bytes of the device that a graph needs for a moment, an estimate."""
        return 0

    def warm_up(self) -> None:
        """Runs each graph once, on nothing but padding."""


EAGER = EncoderGraphs()
