"""Memory of recurrences beyond weights and states: an upper estimate from shapes."""

import math
from collections.abc import Iterable
from typing import Any

from model_runner_base.models.recurrent.layers import is_plain, state_tensors, tiles_at_once
from model_runner_base.models.recurrent.mamba import SEGMENT
from model_runner_base.step.sizes import StepLimits
from model_runner_base.vllm_compat.types.recurrent import is_delta_net, state_shapes

KERNEL_CHUNK = 64
"""Number of tokens in the smallest parts that vLLM's kernels cut chunks into."""


def recurrence_memory(layers: Iterable[Any], limits: StepLimits) -> int:
    """Bytes, in float32, of what the recurrence of one layer holds at a time in the largest step; 0 without layers.

    ``layers`` are vLLM's. A state is counted six times for each chunk tile, or part of one, that is computed at a time
    (maps, their products while they are chained, states before and after), three times for each decode row. Outputs are
    counted twice for all tiles. vLLM's kernels have fewer: ``_kernel_memory``.
    """
    query = limits.chunk.query
    all_tiles = -(-limits.max_num_tokens // query) + limits.max_num_reqs
    worst = 0
    for layer in layers:
        if not is_plain(layer):
            worst = max(worst, _kernel_memory(layer, limits))
            continue
        num_tiles = int(min(all_tiles, tiles_at_once(state_tensors(layer)[-1][1])))
        for state in state_shapes(layer)[1]:
            numbers = math.prod(state)
            if len(state) == 2:  # Mamba: segments of tiles, all tokens of which have inputs of the channels' size.
                tiles = num_tiles * -(-query // SEGMENT) * 6 * numbers + num_tiles * query * 6 * state[0]
            else:
                heads, rows, columns = state
                inside = 5 * query * query + 3 * query * (rows + columns)
                # A gated delta net maps its state by a matrix of keys, [columns, columns] in vLLM's order, and decays
                # of channels, where they have some, are as many numbers as its keys.
                square = 4 * columns * (columns + query) if is_delta_net(layer) else 0
                tiles = num_tiles * (6 * numbers + heads * (inside + square))
            outputs = 2 * all_tiles * query * (numbers // state[-1])
            worst = max(worst, 4 * (tiles + outputs + 3 * limits.max_num_reqs * numbers))
    return worst


def _kernel_memory(layer: Any, limits: StepLimits) -> int:
    """Bytes, in float32, of what vLLM's kernels hold of one layer in the largest step, by the shapes of theirs.

    A state for each part of ``KERNEL_CHUNK`` tokens and two for each request; of each token and head two rows of the
    part's matrix, and keys and values three times.
    """
    num_chunks = -(-limits.max_num_tokens // KERNEL_CHUNK) + 3 * limits.max_num_reqs
    worst = 0
    for state in state_shapes(layer)[1]:
        heads, *sizes = state
        inside = 2 * KERNEL_CHUNK + 3 * sum(sizes) if len(state) == 3 else 6
        worst = max(worst, num_chunks * math.prod(state) * (len(state) == 3) + limits.max_num_tokens * heads * inside)
    return 4 * worst
