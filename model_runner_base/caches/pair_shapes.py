"""Memory of attention in plain torch: how much it may take, and how many pairs of a model's layers fit it."""

import math
from collections.abc import Iterable
from typing import Any

from vllm.config import ModelConfig, VllmConfig

from model_runner_base.attention.pieces import PairShape
from model_runner_base.device_ops import MemoryInfo
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_compat.types.kv_cache import is_of_latents, larger_head

SETTING = "attention_memory_gib"
"""Key of ``additional_config``: memory in GiB that the pairs of one layer may take at a time."""
LARGEST_DEFAULT = 256 << 20
LARGEST_DEFAULT_OF_HOST = 32 << 20
"""Memory of a piece where the device is the host. What is larger fits no cache, and each allocation of 32 MiB is mapped
and cleared anew by the C library: decode rows of a model of 0.6B parameters took two to ten times as long."""
SHARE = 64


def attention_memory(vllm_config: VllmConfig, memory: MemoryInfo) -> int:
    """Bytes that the pairs of one layer may take at a time: the user's setting, or a 64th of the device's memory, but
    256 MiB at most, and 32 MiB where it is the host's.

    Raises UnsupportedConfigError for a setting that is no size.
    """
    config = vllm_config.additional_config
    asked = config.get(SETTING) if isinstance(config, dict) else None
    if asked is None:
        largest = LARGEST_DEFAULT_OF_HOST if memory.is_of_host else LARGEST_DEFAULT
        return min(largest, memory.total // SHARE or largest)
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 < asked < math.inf:
        raise UnsupportedConfigError(f"{SETTING}={asked!r} in additional_config is no size: give GiB above 0")
    return int(asked * (1 << 30))


def pair_shapes(specs: Iterable[Any], model_config: ModelConfig) -> set[PairShape]:
    """Shapes of the pairs of layers with these KV-cache specs; those of encoder-only layers, if there are no specs.

    Query heads are those of the whole model, also where each rank has some of them.
    """
    heads = model_config.model_arch_config.total_num_attention_heads
    shapes = {PairShape(heads, spec.num_kv_heads, larger_head(spec), 1 if is_of_latents(spec) else 2) for spec in specs}
    return shapes or {PairShape(heads, model_config.get_total_num_kv_heads(), model_config.get_head_size())}


def pairs_that_fit(memory: int, shapes: Iterable[PairShape], query: int, keys: int, is_of_row: bool) -> int:
    """Largest number of pairs of any layer that fit ``memory`` bytes, 0 for any number: no layer has attention.

    The other arguments are as in ``PairShape.numbers``.
    """
    largest = max([shape.numbers(query, keys, is_of_row) for shape in shapes], default=0)
    return max(1, memory // (4 * largest)) if largest else 0
