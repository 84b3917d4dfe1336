"""Layers that get all tokens of a replica on each of its ranks, also where replicas share whole experts."""

from vllm.config import ParallelConfig


def keep_tokens_whole() -> None:
    """Has no model that is made from now on in this process cut its tokens over the ranks of tensor parallelism.

    vLLM does so before whole experts that replicas share (sequence parallelism), for its own all-to-all operations.
    """
    setattr(ParallelConfig, "use_sequence_parallel_moe", False)  # noqa: B010  A property, of which mypy knows.
