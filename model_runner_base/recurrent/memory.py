"""Memory of recurrences beyond weights and states: an upper estimate from shapes."""

import math
from collections.abc import Iterable
from typing import Any

from model_runner_base.recurrent.mamba1 import PART
from model_runner_base.step.sizes import StepLimits
from model_runner_base.vllm_compat.types.recurrent import is_delta_net, state_shapes


def recurrence_memory(layers: Iterable[Any], limits: StepLimits) -> int:
    """Bytes, in float32, of what the recurrence of one layer holds at a time in the largest step; 0 without layers.

    ``layers`` are vLLM's. A state is counted six times for each chunk tile or part of one (maps, their products while
    they are chained, states before and after), three times for each decode row.
    """
    query = limits.chunk.query
    num_tiles = -(-limits.max_num_tokens // query) + limits.max_num_reqs
    worst = 0
    for layer in layers:
        for state in state_shapes(layer)[1]:
            numbers = math.prod(state)
            if len(state) == 2:  # Mamba: parts of tiles, all tokens of which have inputs of the channels' size.
                tiles = num_tiles * -(-query // PART) * 6 * numbers + num_tiles * query * 6 * state[0]
            else:
                heads, rows, columns = state
                inside = 5 * query * query + 3 * query * (rows + columns)
                # A gated delta net maps its state by a matrix of keys, [columns, columns] in vLLM's order, and decays
                # of channels, where they have some, are as many numbers as its keys.
                square = 4 * columns * (columns + query) if is_delta_net(layer) else 0
                tiles = num_tiles * (6 * numbers + heads * (inside + square))
            worst = max(worst, 4 * (tiles + 3 * limits.max_num_reqs * numbers))
    return worst
