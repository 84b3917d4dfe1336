"""Blocks of caches whose tensors are replaced by every graph, read and written from the host.

Code outside of the step, such as a KV connector, cannot hold these tensors, and indexing them would be compiled for
each number of blocks. So captured functions read and write blocks in fixed numbers. They are made in warm-up, and
nothing is compiled later. Padding reads and writes the null block, which no request reads.
"""

from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps

Wrap = Callable[[Callable[..., Any], MutableSequence[torch.Tensor]], Callable[..., Any]]
"""Type of ``GraphPolicy.wrap``."""
NUM_AT_ONCE = (1, 8, 64)
"""Numbers of blocks of the captured functions."""


def pieces_of(count: int) -> Iterator[tuple[int, int]]:
    """Yields the first of ``count`` blocks in each call, and the number of blocks of that call."""
    first = 0
    while first < count:
        size = next((size for size in NUM_AT_ONCE if size >= count - first), NUM_AT_ONCE[-1])
        yield first, size
        first += size


class BlockFunctions:
    """Captured functions that read and write blocks of caches of one shape and dtype."""

    def __init__(
        self, caches: MutableSequence[torch.Tensor], place: int, num_blocks: int, wrap: Wrap, device_ops: DeviceOps
    ) -> None:
        """
        Args:
            caches: all caches, which graphs replace.
            place: index of a cache of that shape.
            num_blocks: number of the scheduler's blocks; each is one of the cache's blocks, or several.
            wrap: ``GraphPolicy.wrap``.
            device_ops: copies between device and host.
        """
        self._caches = caches
        self._place = place
        self._device_ops = device_ops
        cache = caches[place]
        self._shape = cache.shape[1:]
        self._blocks_per_kv_block, rest = divmod(cache.shape[0], num_blocks)
        assert not rest, f"{cache.shape[0]} blocks of a cache are not whole ones of {num_blocks}"
        self.dtype = cache.dtype
        self.block_numel = self._blocks_per_kv_block * self._shape.numel()
        self._state = [cache]
        """The one cache that a call works on."""
        self._read = wrap(self._read_in_graph, self._state)
        self._write = wrap(self._write_in_graph, self._state)

    def read(self, place: int, ids: np.ndarray) -> torch.Tensor:
        """Copies blocks [N] of a cache to the host: [N, numbers]."""
        contents = torch.empty((len(ids), self.block_numel), dtype=self.dtype)
        for first, size in pieces_of(len(ids)):
            some = ids[first : first + size]
            read = self._call(place, self._read, self._padded(some, size))
            contents[first : first + size] = read.cpu()[: len(some)]
        return contents

    def write(self, place: int, ids: np.ndarray, contents: torch.Tensor) -> None:
        """Copies contents [N, numbers] on the host to blocks of a cache."""
        for first, size in pieces_of(len(ids)):
            some = ids[first : first + size]
            padded = torch.zeros((size, self.block_numel), dtype=self.dtype)
            padded[: len(some)] = contents[first : first + size]
            self._call(place, self._write, self._padded(some, size), self._device_ops.upload(padded))

    def warm_up(self) -> None:
        """Makes the graphs of all numbers of blocks; writes zeros to the null block."""
        nothing = np.empty(0, np.int64)
        for size in NUM_AT_ONCE:
            zeros = self._device_ops.upload(torch.zeros((size, self.block_numel), dtype=self.dtype))
            self._call(self._place, self._read, self._padded(nothing, size))
            self._call(self._place, self._write, self._padded(nothing, size), zeros)

    def _call(self, place: int, function: Callable[..., Any], *args: torch.Tensor) -> Any:
        """Calls a captured function on a cache, and keeps the tensor that replaces it."""
        self._state[0] = self._caches[place]
        result = function(*args)
        self._caches[place] = self._state[0]
        return result

    def _padded(self, ids: np.ndarray, size: int) -> torch.Tensor:
        """[size] int32 ids on the device; those of padding are the null block's."""
        padded = np.zeros(size, np.int32)
        padded[: len(ids)] = ids
        return self._device_ops.to_device(padded)

    def _read_in_graph(self, ids: torch.Tensor) -> torch.Tensor:
        return self._state[0][self._entries(ids)].reshape(ids.shape[0], self.block_numel)

    def _write_in_graph(self, ids: torch.Tensor, contents: torch.Tensor) -> None:
        self._state[0].index_put_((self._entries(ids),), contents.reshape(-1, *self._shape))

    def _entries(self, ids: torch.Tensor) -> torch.Tensor:
        """Blocks of the cache that scheduler blocks [N] are made of."""
        if self._blocks_per_kv_block == 1:
            return ids
        index = torch.arange(self._blocks_per_kv_block, dtype=ids.dtype, device=ids.device)
        return (ids.unsqueeze(1) * self._blocks_per_kv_block + index).flatten()


class CacheBlocks:
    """Blocks of a cache: ``blocks[ids]`` copies some to the host, and ``blocks[ids] = numbers`` to the device.

    An index is what NumPy takes for one dimension: a block's number, a list, an array or a slice.
    """

    device = torch.device("cpu")
    """Device of what is read."""

    def __init__(self, functions: BlockFunctions, place: int, num_blocks: int) -> None:
        """``place``: index of the cache among all of them."""
        self._functions = functions
        self._place = place
        self._all = np.arange(num_blocks)
        self.shape = num_blocks, functions.block_numel
        self.dtype = functions.dtype

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, blocks: Any) -> torch.Tensor:
        ids = self._ids(blocks)
        contents = self._functions.read(self._place, ids.reshape(-1))
        return contents if ids.ndim else contents[0]

    def __setitem__(self, blocks: Any, numbers: Any) -> None:
        ids = self._ids(blocks).reshape(-1)
        contents = torch.as_tensor(numbers, dtype=self.dtype).expand(len(ids), self.shape[1])
        self._functions.write(self._place, ids, contents)

    def _ids(self, blocks: Any) -> Any:
        return self._all[blocks.numpy() if isinstance(blocks, torch.Tensor) else blocks]


def make_cache_blocks(
    caches: MutableSequence[torch.Tensor],
    place_of: Mapping[str, int],
    num_blocks: int,
    wrap: Wrap,
    device_ops: DeviceOps,
) -> tuple[dict[str, CacheBlocks], Sequence[BlockFunctions]]:
    """Makes the blocks of each layer's cache, and their functions; layers that share a cache have the same blocks.

    ``place_of`` has the index of a layer's cache in ``caches``, by the layer's name.
    """
    functions: dict[Any, BlockFunctions] = {}
    blocks: dict[int, CacheBlocks] = {}
    for place in place_of.values():
        kind = caches[place].shape, caches[place].dtype
        if kind not in functions:
            functions[kind] = BlockFunctions(caches, place, num_blocks, wrap, device_ops)
        blocks.setdefault(place, CacheBlocks(functions[kind], place, num_blocks))
    return {name: blocks[place] for name, place in place_of.items()}, [*functions.values()]
