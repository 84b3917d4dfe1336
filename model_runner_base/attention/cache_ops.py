"""Writing to the KV cache: the one way, for attention layers and for whoever else puts keys and values there."""

import torch


def write_slots(
    kv_cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Writes the keys and values of T tokens in place.

    The cache is indexed by block and offset, never flattened: a compiler then writes the rows where they lie, and
    copies the whole cache otherwise.

    Args:
        kv_cache: [blocks, block size, 2 * K, D], keys ``[:K]`` beside values ``[K:]``.
        blocks: [T] integers.
        offsets: [T] integers, in the block.
        key: [T, K, D] of the cache's dtype.
        value: [T, K, D].
    """
    kv_cache.index_put_((blocks, offsets), torch.cat((key, value), dim=1))
