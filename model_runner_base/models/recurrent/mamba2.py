"""State-space duality of Mamba 2 (Dao and Gu, 2024): a decay for each head.

``S[t] = exp(dt[t] a) S[t - 1] + dt[t] x[t] b[t]^T`` and ``y[t] = S[t] c[t]``, of H heads with P x N numbers each;
groups of heads share b and c. All float32. Inside a tile of tokens the outputs are those of a masked product, as in
attention.
"""

import torch

from model_runner_base.models.recurrent.scan import chain_tiles
from model_runner_base.models.recurrent.step import RowSteps, TileSteps, store

Inputs = tuple[torch.Tensor, ...]


def mamba2_rows(inputs: Inputs, params: Inputs, states: torch.Tensor, step: RowSteps) -> torch.Tensor:
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
