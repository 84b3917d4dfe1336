"""Encoders as graphs, on devices that run them so (``DeviceOps.towers_as_graphs``)."""

from collections.abc import Sequence

from vllm.multimodal.inputs import MultiModalFeatureSpec


def check_rows(item: MultiModalFeatureSpec, count: int) -> None:
    """Raises RuntimeError unless ``count`` embeddings are as many as the item's tokens, which the scheduler counts."""
    if count != item.mm_position.get_num_embeds():
        raise RuntimeError(
            f"the encoder made {count} embeddings of a {item.modality}, but its prompt has "
            f"{item.mm_position.get_num_embeds()} tokens for them"
        )


class EncoderGraphs:
    """Interface of encoder graphs; this default has none, so the model's towers run eagerly."""

    def encode(self, items: Sequence[MultiModalFeatureSpec]) -> Sequence[MultiModalFeatureSpec]:
        """Writes the rows of all items that graphs can encode to the pool; returns the other items."""
        return items

    def step_memory(self) -> int:
        """Bytes of device memory that a graph needs while it runs; an estimate."""
        return 0

    def warm_up(self) -> None:
        """Runs each graph once, on padding only."""


EAGER = EncoderGraphs()
