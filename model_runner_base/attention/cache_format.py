"""Format of a layer's cache tensor: its shape, how keys and values are written, and how a plan's pairs read them.

Attention layers use it, and so does any other code that puts keys and values into a cache.
"""

from dataclasses import dataclass

import torch

from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.numbers import AS_THEY_ARE, Numbers


@dataclass(frozen=True)
class CacheFormat:
    """Format with keys and values of K heads of size D next to each other: heads ``[:K]`` are keys, ``[K:]`` values.

    ``numbers`` says how both lie in memory.
    """

    num_kv_heads: int
    head_size: int
    numbers: Numbers = AS_THEY_ARE

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of a cache tensor."""
        return (num_blocks, block_size, 2 * self.num_kv_heads, self.head_size)

    def view(self, kv_cache: torch.Tensor, block_size: int) -> torch.Tensor:
        """View of the cache in this format's shape; its memory may be shared with a layer that has other heads."""
        shape = self.shape(1, block_size)[1:]
        return kv_cache if kv_cache.shape[1:] == shape else kv_cache.view(-1, *shape)

    def write(
        self,
        kv_cache: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Writes the keys and values of T tokens in place.

        The cache is indexed by block and offset, and never flattened. So a compiler writes the rows in place; otherwise
        it would copy the whole cache.

        Args:
            kv_cache: a cache tensor of this format's shape.
            blocks: [T] integers, the block of each token.
            offsets: [T] integers, the offset of each token in its block.
            key: of the model's dtype, in a shape that ``rows`` takes.
            value: as ``key``.
        """
        kv_cache.index_put_((blocks, offsets), self.numbers.store(self.rows(key, value), kv_cache.dtype))

    def rows(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[T, 2 * K, D] what a cache holds of T tokens: keys, [T, K, D] or [T, K * D], then values, shaped alike."""
        heads = -1, self.num_kv_heads, self.head_size
        return torch.cat((key.view(heads), value.view(heads)), dim=1)

    def read(self, kv_cache: torch.Tensor, plan: PairPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of every pair, each [P, S, K, D] with KV tiles of S positions."""
        if plan.pair_blocks is None:
            tiles = self.numbers.restore(read_lines(kv_cache, plan.pair_tile.shape[0], plan.line_tiles))
            return tiles[..., : self.num_kv_heads, :], tiles[..., self.num_kv_heads :, :]
        shape = (-1, plan.kv_tile, self.num_kv_heads, self.head_size)
        # Two gathers, not one that is split afterwards: a compiler can then gather into the layout of each product.
        keys = kv_cache[:, :, : self.num_kv_heads][plan.pair_blocks]
        values = kv_cache[:, :, self.num_kv_heads :][plan.pair_blocks]
        return self.numbers.restore(keys.view(shape)), self.numbers.restore(values.view(shape))


def read_lines(kv_cache: torch.Tensor, num_lines: int, num_tiles: int) -> torch.Tensor:
    """First ``num_tiles`` KV tiles of every cache line but the null one, [lines, S, 2 * K, D]: a slice, no gather.

    It is for decode on a contiguous cache (``block_size=max_model_len``), whose blocks [lines * tiles, ...] are whole
    lines. It pays where most lines are in use, with contexts of similar length. ``GraphPolicy.choose`` finds such
    steps; all others read tile by tile.
    """
    lines = kv_cache.view(num_lines + 1, -1, *kv_cache.shape[1:])
    return lines[1:, :num_tiles].flatten(1, 2)
