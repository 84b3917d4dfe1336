"""Cache operations with vLLM's meaning: of static shapes, in place where the cache is donated state.

Under openxla they become graphs by ``GraphPolicy.wrap``, the caches as the state:

    caches = [...]
    write = policy.wrap(lambda key, value, slots: reshape_and_cache(key, value, caches[0], slots), caches)
    write(key, value, slots)

They return nothing, run eager as well, and were not run on Neuron hardware.
"""

from collections.abc import Sequence

import torch

from model_runner_base.attention.cache_format import CacheFormat


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes the keys and values of T >= 1 tokens to their slots; tokens whose slot is -1 are padding and skipped.

    Args:
        key: [T, K, D] of the cache's dtype.
        value: [T, K, D].
        kv_cache: [blocks, block size, 2 * K, D], keys ``[:K]``, then values ``[K:]``.
        slot_mapping: [T] integers, ``block * block_size + offset``; no slot but -1 occurs twice.
    """
    # A scatter of static shape writes every row. So padding repeats what the first real token writes; where there is
    # none, all write back what the first slot holds.
    is_real = slot_mapping >= 0
    tokens = torch.arange(slot_mapping.shape[0], dtype=torch.int64, device=slot_mapping.device)
    source = torch.where(is_real, tokens, is_real.to(torch.int32).argmax())
    slots = slot_mapping[source].clamp(min=0)
    kv_heads = key.shape[1]
    key = torch.where(is_real.any(), key[source], kv_cache[0, 0, :kv_heads])
    value = torch.where(is_real.any(), value[source], kv_cache[0, 0, kv_heads:])
    blocks, offsets = split_slots(slots, kv_cache.shape[1])
    CacheFormat(kv_heads, key.shape[2]).write(kv_cache, blocks, offsets, key, value)


def split_slots(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset of each slot, exact for up to 2^22 blocks.

    XLA is given the division of integers in float32, which may miss the block by one.
    """
    blocks = slots // block_size
    offsets = slots - blocks * block_size
    blocks = blocks + (offsets >= block_size).to(slots.dtype) - (offsets < 0).to(slots.dtype)
    return blocks, slots - blocks * block_size


def copy_blocks(kv_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor) -> None:
    """Copies whole blocks within each cache, as if all were read before any is written.

    Args:
        kv_caches: each [blocks, ...], of any dtype.
        block_mapping: [n, 2] integers, (source, destination); no destination occurs twice, but as padding a pair of a
            block with itself may be repeated.
    """
    source, destination = block_mapping.unbind(1)
    for kv_cache in kv_caches:
        kv_cache.index_put_((destination,), kv_cache[source])
