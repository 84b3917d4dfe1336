"""Paged kind of cache: attention over block-sparse plans (attention/plan.py), and the costs of a plan's dims."""

from typing import Self

from model_runner_base.caches.group import AttentionGroup, ModelCaches
from model_runner_base.caches.plans import PlannedCaches
from model_runner_base.step.sizes import Dim, Tiling


def plan_dims(decode: Tiling, chunk: Tiling, cross_len: int = 0) -> tuple[Dim, ...]:
    """Dims that plans add to a step. A pair costs the reading of its keys, and the arithmetic of its queries.

    In a model with cross-attention, each row and tile also meets the ``cross_len`` keys of an encoder's output.

    The weights are a compromise between measurements with a small model on a CPU, where pairs cost more, and the
    arithmetic of a large model, where they cost less. A KV tile that is read as part of a cache line costs less than a
    gathered one (docs/kv_cache.md).
    """
    row, tile = (pair.keys / 64 * (1 + pair.query / 16) * cost for pair, cost in ((decode, 0.25), (chunk, 0.16)))
    cross_row, cross_tile = row * -(-cross_len // decode.keys), tile * -(-cross_len // chunk.keys)
    return (
        Dim("decode_rows", (cross_row, cross_row, 0.0)),
        Dim("decode_pairs", (row, row, 0.75 / 4)),
        Dim("chunk_tokens", (0.0, 0.0, 0.0)),
        Dim("chunk_tiles", (0.0, 1.0 + cross_tile, 0.0)),
        Dim("chunk_pairs", (0.0, tile, 0.0)),
    )


class PagedCaches(PlannedCaches):
    """Groups whose keys and values stay in blocks that the scheduler gives."""

    @classmethod
    def make(cls, model: ModelCaches) -> Self | None:
        groups = paged_groups(model)
        return cls(groups, model.limits, model.spans) if groups else None


def paged_groups(model: ModelCaches) -> list[AttentionGroup]:
    """Groups that the base plans, of layers with a cache of their own tokens."""
    return [each for each in model.groups if each.reads_plans and not each.key_range.is_whole and not each.cross_len]
