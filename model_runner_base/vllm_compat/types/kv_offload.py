"""vLLM's offloading of cache blocks to the host, whose modules and types differ between releases."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from vllm import envs

_spec: Any = import_module("vllm.v1.kv_offload.cpu")
IS_BY_GROUP = not hasattr(_spec, "CPUOffloadingSpec")
"""Whether a job names the blocks of each KV-cache group. Otherwise there is one group."""
_spec = import_module("vllm.v1.kv_offload.cpu.spec") if IS_BY_GROUP else _spec
_jobs: Any = import_module("vllm.v1.kv_offload.base" if IS_BY_GROUP else "vllm.v1.kv_offload.worker.worker")

CPUOffloadingSpec: Any = _spec.CPUOffloadingSpec


def block_specs() -> tuple[type, type]:
    """Types of the two sides of a job: blocks on the device, chunks on the host. For releases of one group."""
    mediums: Any = import_module("vllm.v1.kv_offload.mediums")
    return mediums.GPULoadStoreSpec, mediums.CPULoadStoreSpec


def host_chunks(spec: Any) -> tuple[int, int]:
    """Number of chunks that an offloading spec keeps on the host, and number of blocks in each."""
    if IS_BY_GROUP:
        return spec.num_chunks, spec.blocks_per_chunk
    return spec.num_blocks, spec.offloaded_block_size // spec.gpu_block_size


def groups_of(device: Any, blocks_per_chunk: int) -> Iterator[tuple[int, int]]:
    """Number of a job's blocks in each KV-cache group, and the place of the first of them in its chunk.

    Args:
        device: the side of the job that is on the device.
        blocks_per_chunk: number of blocks in a chunk.
    """
    if IS_BY_GROUP:
        for count, index in zip(device.group_sizes, device.block_indices, strict=True):
            yield count, index % blocks_per_chunk
    else:  # A job ends with a whole chunk.
        yield len(device.block_ids), -len(device.block_ids) % blocks_per_chunk


def transfer_result(job_id: int, num_bytes: int, seconds: float, is_store: bool) -> Any:
    """Result of a job that succeeded."""
    if IS_BY_GROUP:
        return _jobs.TransferResult(job_id, True, num_bytes, seconds)
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return _jobs.TransferResult(job_id, True)  # Such a release cannot log the figures of an engine in its process.
    mediums = ("GPU", "CPU") if is_store else ("CPU", "GPU")
    return _jobs.TransferResult(job_id, True, num_bytes, seconds, mediums)
