"""Selective scan of Mamba (Gu and Dao, 2023): a decay for each channel and each number of its state.

``S[t] = exp(dt[t] a) S[t - 1] + dt[t] x[t] b[t]`` and ``y[t] = S[t] c[t]``, of D channels with N numbers each. All
float32. The part of the output that does not depend on the state (``D x``) and the gate are the layer's.
"""

import torch

from model_runner_base.models.recurrent.scan import chain
from model_runner_base.models.recurrent.step import RowSteps, TileSteps, store

PART = 16
"""Tokens of a part: inside a part token follows token, all parts next to each other. Doubling over single tokens would
read every state log2(tokens) times, which took 10 to 20 times as long."""

Inputs = tuple[torch.Tensor, ...]


def mamba1_rows(inputs: Inputs, params: Inputs, states: torch.Tensor, step: RowSteps) -> torch.Tensor:
    """[R, D] for decode rows.

    Args:
        inputs: x and dt [R, D], b and c [R, N].
        params: a [D, N].
        states: [S, D, N], updated.
    """
    (x, dt, b, c), (a,) = inputs, params
    state = step.load(states).float() * torch.exp(dt.unsqueeze(2) * a) + (dt * x).unsqueeze(2) * b.unsqueeze(1)
    store(states, step.states, state)
    return (state * c.unsqueeze(1)).sum(dim=2)


def mamba1_tiles(inputs: Inputs, params: Inputs, states: torch.Tensor, tiles: TileSteps) -> torch.Tensor:
    """[C, D] for tokens of chunks; arguments as for rows, C tokens instead of R."""
    (a,), (num_tiles, query) = params, tiles.tokens.shape
    size = PART if query % PART == 0 else query
    num_parts = query // size
    x, dt, b, c = (tiles.tiled(each).view(num_tiles * num_parts, size, -1) for each in inputs)
    state, outs = torch.zeros(x.shape[0], *a.shape, dtype=x.dtype, device=x.device), []
    for token in range(size):
        state = state * torch.exp(dt[:, token].unsqueeze(2) * a)
        state = state + (dt[:, token] * x[:, token]).unsqueeze(2) * b[:, token].unsqueeze(1)
        outs.append((state * c[:, token].unsqueeze(1)).sum(dim=2))
    total = dt.cumsum(dim=1)
    first_part = torch.arange(num_parts, device=x.device) == 0
    begin, after = chain(
        torch.exp(total[:, -1].unsqueeze(2) * a),
        state,
        tiles.load(states).float().repeat_interleave(num_parts, dim=0),
        (tiles.is_first.unsqueeze(1) & first_part).flatten(),
        torch.mul,
    )
    store(states, tiles.written, after.view(num_tiles, num_parts, *a.shape)[:, -1])
    for token in range(size):
        carried = begin * torch.exp(total[:, token].unsqueeze(2) * a)
        outs[token] = outs[token] + (carried * c[:, token].unsqueeze(1)).sum(dim=2)
    return tiles.flat(torch.stack(outs, dim=1).view(num_tiles, query, -1))
