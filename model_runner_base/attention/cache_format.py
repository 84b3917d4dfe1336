"""Format of a layer's cache tensor: its shape, how keys and values are written, and how a plan's pairs read them.

Attention layers use it, and so does any other code that puts keys and values into a cache.
"""

from dataclasses import dataclass

import torch

from model_runner_base.attention.metadata import PairPlan

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Formats of eight bits, by vLLM's names of ``kv_cache_dtype``."""


class Numbers:
    """Numbers in the model's dtype, stored as they are."""

    def store(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Numbers as a cache tensor of ``dtype`` has them, of the same shape."""
        return numbers

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """Numbers in the model's dtype, from what ``store`` made."""
        return stored


AS_THEY_ARE = Numbers()


@dataclass(frozen=True)
class Float8(Numbers):
    """Numbers of eight bits, in a cache of that dtype or of bytes (``DeviceOps.has_float8_caches``).

    A number is rounded to the nearest one of the format. One beyond its largest finite number becomes that: a plain
    cast would make it NaN, or infinite.
    """

    kind: torch.dtype
    """The format: ``float8_e4m3fn``, of 3 bits of mantissa, up to 448; ``float8_e5m2``, of 2 bits, up to 57344."""
    dtype: torch.dtype
    """The model's dtype."""

    def store(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        limit = torch.finfo(self.kind).max
        stored = numbers.float().clamp(-limit, limit).to(self.kind)
        return stored if dtype == self.kind else stored.view(dtype)

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        return (stored if stored.dtype == self.kind else stored.view(self.kind)).to(self.dtype)


def numbers_of(kv_cache_dtype: str, dtype: torch.dtype) -> Numbers:
    """Numbers of vLLM's ``kv_cache_dtype``, for a model of ``dtype``; raises NotImplementedError for others."""
    if kv_cache_dtype == "auto":
        return AS_THEY_ARE
    if kv_cache_dtype in FLOAT8:
        return Float8(FLOAT8[kv_cache_dtype], dtype)
    raise NotImplementedError(
        f"kv_cache_dtype={kv_cache_dtype} is not supported in plain torch: use auto, {', '.join(FLOAT8)}"
    )


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
        """Keys and values of every pair, each [P, S, K, D] with KV tiles of S positions.

        They hold nothing of other requests, except those of pairs that see no key: entries that no query of a pair sees
        may hold a NaN, which a weight of 0 does not remove.
        """
        if plan.pair_blocks is None:
            tiles = self.numbers.restore(read_lines(kv_cache, plan))
            return tiles[..., : self.num_kv_heads, :], tiles[..., self.num_kv_heads :, :]
        shape = (-1, plan.kv_tile, self.num_kv_heads, self.head_size)
        # Two gathers, not one that is split afterwards: a compiler can then gather into the layout of each product.
        cache, entries = kv_cache.flatten(0, 1), plan.entries
        keys = cache[:, : self.num_kv_heads].index_select(0, entries)
        values = cache[:, self.num_kv_heads :].index_select(0, entries)
        return self.numbers.restore(keys.view(shape)), self.numbers.restore(values.view(shape))


def read_lines(kv_cache: torch.Tensor, plan: PairPlan) -> torch.Tensor:
    """First ``line_tiles`` KV tiles of every cache line but the null one, [lines, S, 2 * K, D]: a slice, no gather.
    Entries that no query sees are 0.

    It is for decode on a contiguous cache (``block_size=max_model_len``), whose blocks [lines * tiles, ...] are whole
    lines. It pays where most lines are in use, with contexts of similar length. ``GraphPolicy.choose`` finds such
    steps; all others read tile by tile.
    """
    lines = kv_cache.view(plan.pair_tile.shape[0] + 1, -1, *kv_cache.shape[1:])
    tiles = lines[1:, : plan.line_tiles].flatten(1, 2)
    return torch.where(plan.is_seen.unsqueeze(2).unsqueeze(3), tiles, 0)
