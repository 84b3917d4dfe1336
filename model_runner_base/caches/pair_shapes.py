"""Memory of attention in plain torch: how much it may take, and how many pairs of a model's layers fit it."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm.config import ModelConfig, VllmConfig

from model_runner_base.attention.pieces import PairShape
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_compat.types.kv_cache import is_of_latents, larger_head

SETTING = "attention_memory_gib"
"""Key of ``additional_config``: memory in GiB that the pairs of one layer may take at a time."""
SHARE = 64
"""Part of the device's memory that is the default, up to the largest."""


class AttentionMemory(NamedTuple):
    """Bytes that the pairs of one layer may take at a time."""

    rows: int
    """Bytes for pairs of decode rows."""
    chunks: int
    """Bytes for pairs of chunk tiles."""


LARGEST_DEFAULT = AttentionMemory(256 << 20, 256 << 20)
"""Largest default. Larger pieces were read no faster on the devices that were measured."""
LARGEST_DEFAULT_ON_HOST = AttentionMemory(12 << 20, 32 << 20)
"""Largest default where memory is the host's. The C library maps and clears each array of 32 MiB anew, and what does
not fit a processor's caches is read several times as slowly. A piece of chunks is merged into larger results than one
of rows, so fewer pieces pay there."""


def attention_memory(vllm_config: VllmConfig, device_memory: int, is_on_host: bool) -> AttentionMemory:
    """Memory of attention: what the user asks for, or a 64th of ``device_memory``, which is 0 where it is not known,
    within the largest default."""
    asked = asked_memory(vllm_config)
    if asked is not None:
        return AttentionMemory(asked, asked)
    largest = LARGEST_DEFAULT_ON_HOST if is_on_host else LARGEST_DEFAULT
    return AttentionMemory(*(min(each, device_memory // SHARE or each) for each in largest))


def asked_memory(vllm_config: VllmConfig) -> int | None:
    """Bytes that the user asks for; None: the default. Raises UnsupportedConfigError for a setting that is no size."""
    config = vllm_config.additional_config
    asked = config.get(SETTING) if isinstance(config, dict) else None
    if asked is None:
        return None
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 < asked < math.inf:
        raise UnsupportedConfigError(f"{SETTING}={asked!r} in additional_config is no size: give GiB above 0")
    return max(1, int(asked * (1 << 30)))


def pair_shapes(specs: Iterable[Any], model_config: ModelConfig) -> set[PairShape]:
    """Shapes of the pairs of layers with these KV-cache specs; those of encoder-only layers, if there are no specs.

    Query heads are those of the whole model, also where each rank has some of them. Where layers keep one row a token,
    rows that are longer than the model's heads are none that pairs read (attention/compressed.py).
    """
    heads = model_config.model_arch_config.total_num_attention_heads
    shapes = set[PairShape]()
    for spec in specs:
        size, num_halves = larger_head(spec), 2
        if is_of_latents(spec):
            size, num_halves = min(size, model_config.get_head_size()), 1
        shapes.add(PairShape(heads, spec.num_kv_heads, size, num_halves))
    return shapes or {PairShape(heads, model_config.get_total_num_kv_heads(), model_config.get_head_size())}


def pairs_that_fit(memory: int, shapes: Iterable[PairShape], query: int, keys: int, is_decode: bool) -> int:
    """Largest number of pairs of any layer that fit ``memory`` bytes, 0 for any number: no layer has attention.

    The other arguments are as in ``PairShape.numbers``.
    """
    largest = max([shape.numbers(query, keys, is_decode) for shape in shapes], default=0)
    return max(1, memory // (4 * largest)) if largest else 0
