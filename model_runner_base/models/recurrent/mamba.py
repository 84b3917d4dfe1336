"""Recurrences of Mamba: the selective scan of Mamba 1, and the state-space duality of Mamba 2.

Both are float32. Rows are decode rows, tiles are tokens of chunks.

Mamba 1 (Gu and Dao, 2023) has a decay for each channel and each number of its state:
``S[t] = exp(dt[t] a) S[t - 1] + dt[t] x[t] b[t]`` and ``y[t] = S[t] c[t]``, of D channels with N numbers each. The part
of the output that does not depend on the state (``D x``) and the gate are the layer's.

Mamba 2 (Dao and Gu, 2024) has a decay for each head:
``S[t] = exp(dt[t] a) S[t - 1] + dt[t] x[t] b[t]^T`` and ``y[t] = S[t] c[t]``, of H heads with P x N numbers each;
groups of heads share b and c. Inside a tile of tokens the outputs are those of a masked product, as in attention.
"""

import torch

from model_runner_base.models.recurrent.operations import chain, chain_tiles
from model_runner_base.models.recurrent.step import DecodeSteps, TileSteps, store

SEGMENT = 16
"""Tokens of a segment: inside it token follows token, all segments next to each other. Doubling over single tokens
would read every state log2(tokens) times, which took 10 to 20 times as long."""

Inputs = tuple[torch.Tensor, ...]


def mamba1_rows(inputs: Inputs, params: Inputs, states: torch.Tensor, step: DecodeSteps) -> torch.Tensor:
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
    size = SEGMENT if query % SEGMENT == 0 else query
    num_segments = query // size
    x, dt, b, c = (tiles.tiled(each).view(num_tiles * num_segments, size, -1) for each in inputs)
    state, outs = torch.zeros(x.shape[0], *a.shape, dtype=x.dtype, device=x.device), []
    for token in range(size):
        state = state * torch.exp(dt[:, token].unsqueeze(2) * a)
        state = state + (dt[:, token] * x[:, token]).unsqueeze(2) * b[:, token].unsqueeze(1)
        outs.append((state * c[:, token].unsqueeze(1)).sum(dim=2))
    total = dt.cumsum(dim=1)
    first_segment = torch.arange(num_segments, device=x.device) == 0
    begin, after = chain(
        torch.exp(total[:, -1].unsqueeze(2) * a),
        state,
        tiles.load(states).float().repeat_interleave(num_segments, dim=0),
        (tiles.is_first.unsqueeze(1) & first_segment).flatten(),
        torch.mul,
    )
    store(states, tiles.written, after.view(num_tiles, num_segments, *a.shape)[:, -1])
    for token in range(size):
        carried = begin * torch.exp(total[:, token].unsqueeze(2) * a)
        outs[token] = outs[token] + (carried * c[:, token].unsqueeze(1)).sum(dim=2)
    return tiles.flat(torch.stack(outs, dim=1).view(num_tiles, query, -1))


def mamba2_rows(inputs: Inputs, params: Inputs, states: torch.Tensor, step: DecodeSteps) -> torch.Tensor:
    """[R, H, P] for decode rows.

    Args:
        inputs: x [R, H, P], dt [R, H], b and c [R, G, N].
        params: a [H].
        states: [S, H, P, N], updated.
    """
    (x, dt, b, c), (a,) = inputs, params
    b, c = (each.repeat_interleave(x.shape[1] // each.shape[1], dim=1) for each in (b, c))
    state = step.load(states).float() * torch.exp(dt * a).view(*dt.shape, 1, 1)
    state = state + (x * dt.unsqueeze(2)).unsqueeze(3) * b.unsqueeze(2)
    store(states, step.states, state)
    return (state @ c.unsqueeze(3)).squeeze(3)


def mamba2_tiles(inputs: Inputs, params: Inputs, states: torch.Tensor, tiles: TileSteps) -> torch.Tensor:
    """[C, H, P] for tokens of chunks; arguments as for rows, C tokens instead of R."""
    (a,), heads_of_group = params, inputs[0].shape[1] // inputs[2].shape[1]
    x, dt, b, c = (tiles.tiled(each) for each in inputs)
    log = (dt * a).cumsum(dim=1).transpose(1, 2)  # [NT, H, Q]
    x = (x * dt.unsqueeze(3)).transpose(1, 2)  # [NT, H, Q, P]
    b, c = b.transpose(1, 2), c.transpose(1, 2)  # [NT, G, Q, N]
    scores = (c @ b.transpose(2, 3)).repeat_interleave(heads_of_group, dim=1)
    inside = (scores * decays(log)) @ x
    b, c = (each.repeat_interleave(heads_of_group, dim=1) for each in (b, c))
    whole = log[..., -1:]
    added = (x * torch.exp(whole - log).unsqueeze(3)).transpose(2, 3) @ b  # [NT, H, P, N]
    begin = chain_tiles(torch.exp(whole).unsqueeze(3), added, states, tiles, torch.mul)
    out = inside + (c * torch.exp(log).unsqueeze(3)) @ begin.transpose(2, 3)
    return tiles.flat(out.transpose(1, 2))


def decays(log: torch.Tensor) -> torch.Tensor:
    """[..., Q, Q] decay from the second index's token to the first's, 0 where that comes later.

    ``log`` [..., Q] are logarithms of decays, summed up to each token.
    """
    is_seen = torch.ones(log.shape[-1], log.shape[-1], dtype=torch.bool, device=log.device).tril()
    # A difference above the diagonal may overflow: 0 there before it is raised.
    return torch.where(is_seen, torch.exp(torch.where(is_seen, log.unsqueeze(-1) - log.unsqueeze(-2), 0)), 0)
