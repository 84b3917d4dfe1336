"""Cache blocks on the host: vLLM's offloading connector, with copies in plain torch.

vLLM's manager decides which blocks are on the host, and which of them make space for others. A copy runs when it is
asked for, and is finished then: a store begins before the next step writes to a block that was given up, and a load
ends before the step that reads it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from model_runner_base.caches.cache_blocks import CacheBlocks
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_compat.types.kv_offload import (
    CPUOffloadingSpec,
    block_specs,
    groups_of,
    host_chunks,
    transfer_result,
)

Blocks = torch.Tensor | CacheBlocks
"""Blocks of a cache on the device."""


class HostBlocks:
    """Memory on the host for blocks of some cache tensors, in chunks of several blocks."""

    def __init__(self, tensors: Sequence[Blocks], num_chunks: int, blocks_per_chunk: int) -> None:
        """
        Args:
            tensors: each [blocks, numbers], views of the caches, or ``CacheBlocks``.
            num_chunks: number of chunks on the host.
            blocks_per_chunk: number of blocks in a chunk.
        """
        if not num_chunks:
            raise UnsupportedConfigError("kv_offloading_size holds no cache block: raise it, or leave it out")
        self._tensors = tensors
        self._per_chunk = blocks_per_chunk
        num_blocks = num_chunks * blocks_per_chunk
        sizes = [tensor.shape[1] * tensor.dtype.itemsize for tensor in tensors]
        self._host = [torch.zeros((num_blocks, size), dtype=torch.uint8) for size in sizes]

    def store(self, tensor: int, blocks: np.ndarray, chunks: np.ndarray, first: int) -> int:
        """Copies consecutive blocks of a request to the host; returns the number of bytes.

        Args:
            tensor: number of the cache tensor.
            blocks: [N] block ids.
            chunks: ids of the chunks that hold these blocks.
            first: place of the first block in the first chunk.
        """
        places, ids = self._places(chunks, first, len(blocks)), torch.from_numpy(blocks.astype(np.int64))
        cache, host = self._tensors[tensor], self._host[tensor]
        host[places] = cache[ids.to(cache.device)].cpu().view(torch.uint8)
        return len(blocks) * host.shape[1]

    def load(self, tensor: int, blocks: np.ndarray, chunks: np.ndarray, first: int) -> int:
        """Copies blocks from the host; takes and returns what ``store`` does."""
        places, ids = self._places(chunks, first, len(blocks)), torch.from_numpy(blocks.astype(np.int64))
        cache, host = self._tensors[tensor], self._host[tensor]
        cache[ids.to(cache.device)] = host[places].view(cache.dtype).to(cache.device)
        return len(blocks) * host.shape[1]

    def _places(self, chunks: np.ndarray, first: int, count: int) -> torch.Tensor:
        """[count] int64 indices of blocks in the host's memory."""
        index = first + np.arange(count)
        places = chunks[index // self._per_chunk].astype(np.int64) * self._per_chunk + index % self._per_chunk
        return torch.from_numpy(places)


class Piece(NamedTuple):
    """Consecutive blocks of a request in one KV-cache group, and the chunks on the host that hold them."""

    tensors: Sequence[int]
    blocks: np.ndarray
    chunks: np.ndarray
    first: int
    """Place of the first block in the first chunk."""


class HostTransfers:
    """Jobs of vLLM's offloading connector. Some releases submit stores and loads, others by ``transfer_async``."""

    def __init__(self, blocks: HostBlocks, tensors_of: Sequence[Sequence[int]], blocks_per_chunk: int) -> None:
        """``tensors_of`` lists the cache tensors of each KV-cache group."""
        self._blocks = blocks
        self._tensors_of = tensors_of
        self._per_chunk = blocks_per_chunk
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._blocks.store, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, self._blocks.load, dst_spec, src_spec, is_store=False)

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        on_device, _ = block_specs()
        return (self.submit_store if isinstance(spec[0], on_device) else self.submit_load)(job_id, *spec)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: a job is finished when it is submitted."""

    def shutdown(self) -> None:
        """Does nothing: the memory is freed with this object."""

    def _copy(self, job_id: int, copy: Any, device: Any, host: Any, is_store: bool) -> bool:
        start, num_bytes = time.perf_counter(), 0
        for tensors, *piece in self._pieces(device, host.block_ids):
            num_bytes += sum(copy(tensor, *piece) for tensor in tensors)
        self._done.append(transfer_result(job_id, num_bytes, time.perf_counter() - start, is_store))
        return True

    def _pieces(self, device: Any, chunks: np.ndarray) -> Iterator[Piece]:
        """Cuts a job by KV-cache groups."""
        block = chunk = 0
        for group, (count, first) in enumerate(groups_of(device, self._per_chunk)):
            num_chunks = -(-(first + count) // self._per_chunk)
            blocks = device.block_ids[block : block + count]
            yield Piece(self._tensors_of[group], blocks, chunks[chunk : chunk + num_chunks], first)
            block, chunk = block + count, chunk + num_chunks


class HostOffloadingSpec(CPUOffloadingSpec):
    """vLLM's offloading to the host, with copies in plain torch."""

    def get_worker(self, kv_caches: Any) -> HostTransfers:
        """Jobs of this worker; ``kv_caches`` are vLLM's ``CanonicalKVCaches``."""
        tensors = [each.tensor for each in kv_caches.tensors]
        return self._make(tensors, [sorted({ref.tensor_idx for ref in group}) for group in kv_caches.group_data_refs])

    def get_handlers(self, kv_caches: Mapping[str, Blocks], attn_backends: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yields the same where vLLM asks for a handler of each direction; such releases have one KV-cache group."""
        tensors = {_memory_of(cache): cache for cache in kv_caches.values()}
        transfers, (on_device, on_host) = self._make([*tensors.values()], [range(len(tensors))]), block_specs()
        yield on_device, on_host, transfers
        yield on_host, on_device, transfers

    def _make(self, tensors: Sequence[Blocks], tensors_of: Sequence[Sequence[int]]) -> HostTransfers:
        num_chunks, blocks_per_chunk = host_chunks(self)
        return HostTransfers(HostBlocks(tensors, num_chunks, blocks_per_chunk), tensors_of, blocks_per_chunk)


def _memory_of(cache: Blocks) -> int:
    """A number that is the same for layers that share a cache."""
    return cache.data_ptr() if isinstance(cache, torch.Tensor) else id(cache)
