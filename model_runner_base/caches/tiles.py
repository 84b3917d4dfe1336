"""KV tiles of decode rows and of chunks: how many positions each has, in whole blocks."""

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend

from model_runner_base.attention.paged import reads_plans
from model_runner_base.attention.plan import kv_tile_for, stored_block_size


def least_tile(vllm_config: VllmConfig, kv_tile_target: int) -> int:
    """KV tile of decode rows for the configured block size, with which ``StepLimits`` count pairs.

    vLLM multiplies the block size of groups whose layers keep less of a token; their tiles must not be smaller.
    """
    return kv_tile_for(vllm_config.cache_config.block_size, kv_tile_target)


def least_chunk_tile(vllm_config: VllmConfig, tiles: tuple[int, int]) -> int:
    """KV tile of chunks with which ``StepLimits`` count pairs; ``tiles`` are ``KV_TILE`` and ``CHUNK_KV_TILE``."""
    return whole_blocks(stored_block_size(vllm_config.cache_config.block_size, tiles[0]), tiles[1])


def stored_size(block_size: int, backend: type[AttentionBackend], vllm_config: VllmConfig, kv_tile_target: int) -> int:
    """Number of tokens in a block of the cache tensors; a backend's own kernels take the scheduler's blocks as they
    are."""
    if not reads_plans(backend):
        return block_size
    return stored_block_size(block_size, kv_tile_target, least_tile(vllm_config, kv_tile_target))


def whole_blocks(block_size: int, target: int, least: int = 1) -> int:
    """Number of positions in as many whole blocks as fit in ``target``, and at least ``least``."""
    return max(target // block_size, -(-least // block_size)) * block_size
