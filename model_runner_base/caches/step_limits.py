"""Limits of one step, from vLLM's config and the device's tiles."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig

from model_runner_base.attention.paged import reads_plans
from model_runner_base.caches.attention_groups import least_chunk_tile, least_tile
from model_runner_base.caches.builders import decode_dims
from model_runner_base.caches.pair_shapes import AttentionMemory, pair_shapes, pairs_that_fit
from model_runner_base.models.recurrent.layers import is_plain
from model_runner_base.step.sizes import COMMON_DIMS, Dim, StepLimits, Tiling
from model_runner_base.vllm_compat.types.kv_cache import attention_layers, cross_length
from model_runner_base.vllm_compat.types.recurrent import recurrent_layers
from model_runner_base.vllm_compat.types.speculation import read_speculation


def step_limits(
    vllm_config: VllmConfig, max_model_len: int, kv_tile: int, chunk_query_tile: int, chunk_kv_tile: int, num_lines: int
) -> StepLimits:
    """Limits of a step, and the tilings of attention; ``kv_tile`` and the next two are as in ``ModelRunnerBase``."""
    scheduler = vllm_config.scheduler_config
    speculation = read_speculation(vllm_config)
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    decode = Tiling(1 + speculation.num_drafts, least_tile(vllm_config, kv_tile) * ranks)
    chunk = Tiling(chunk_query_tile, least_chunk_tile(vllm_config, (kv_tile, chunk_kv_tile)) * ranks)
    layers = attention_layers(vllm_config).values()
    has_plans = all(reads_plans(layer.get_attn_backend()) for layer in layers)
    has_plans = has_plans and all(map(is_plain, recurrent_layers(vllm_config).values()))
    cross_len = cross_length(vllm_config)
    decodes = vllm_config.model_config.runner_type != "pooling"
    return StepLimits(
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_num_reqs=scheduler.max_num_seqs,
        max_model_len=max_model_len,
        decode=decode,
        chunk=chunk,
        dims=(*COMMON_DIMS, *(plan_dims(decode, chunk, cross_len) if has_plans else decode_dims(decode))),
        num_lines=num_lines if decodes else 0,
        unread=speculation.unread,
        ahead=speculation.ahead,
        pass_tokens=speculation.pass_tokens,
        cross_len=cross_len,
        # A prompt comes whole in the step in which its sound is encoded.
        decodes=decodes,
        max_arrivals=max(1, scheduler.max_num_encoder_input_tokens // cross_len) if cross_len else None,
    )


def in_pieces(limits: StepLimits, memory: AttentionMemory, specs: Iterable[Any], vllm_config: VllmConfig) -> StepLimits:
    """``limits`` with as many pairs at a time as fit ``memory`` in a layer with one of these KV-cache specs."""
    if not attention_layers(vllm_config):
        return limits
    shapes = pair_shapes(specs, vllm_config.model_config)
    return replace(
        limits,
        decode_piece=pairs_that_fit(memory.rows, shapes, limits.longest_row, limits.decode.keys, is_decode=True),
        chunk_piece=pairs_that_fit(memory.chunks, shapes, limits.chunk.query, limits.chunk.keys, is_decode=False),
    )


def plan_dims(decode: Tiling, chunk: Tiling, cross_len: int = 0) -> tuple[Dim, ...]:
    """Dims that plans add to a step. A pair costs the reading of its keys, and the arithmetic of its queries.

    In a model with cross-attention, each row and tile also meets the ``cross_len`` keys of an encoder's output.

    The weights are a compromise between measurements with a small model on a CPU, where pairs cost more, and the
    arithmetic of a large model, where they cost less. A KV tile that is read as part of a cache line costs less than a
    gathered one (docs/kv_cache.md).
    """
    row, tile = (pair.keys / 64 * (1 + pair.query / 16) * cost for pair, cost in ((decode, 0.25), (chunk, 0.16)))
    cross_row, cross_tile = row * -(-cross_len // decode.keys), tile * -(-cross_len // chunk.keys)
    return (
        Dim("decode_rows", (cross_row, cross_row, 0.0)),
        Dim("decode_pairs", (row, row, 0.75 / 4)),
        Dim("chunk_tokens", (0.0, 0.0, 0.0)),
        Dim("chunk_tiles", (0.0, 1.0 + cross_tile, 0.0)),
        Dim("chunk_pairs", (0.0, tile, 0.0)),
    )
