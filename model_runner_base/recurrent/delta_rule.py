"""Gated delta rule (Yang and others, 2024): a state that maps keys to values, corrected by what it gets wrong.

``S' = exp(log[t]) S[t - 1]``, ``S[t] = S' + k[t] (beta[t] (v[t] - S'^T k[t]))^T`` and ``y[t] = S[t]^T q[t]``, of H
heads with K x V numbers each. All float32. Inside a tile the corrections solve a unit lower triangular system (the WY
form of the paper); across tiles the state passes by a map with the matrix ``exp(log) I - K^T W``.
"""

import torch

from model_runner_base.recurrent.mamba2 import decays
from model_runner_base.recurrent.scan import chain_tiles
from model_runner_base.recurrent.step import RowSteps, TileSteps, store

Inputs = tuple[torch.Tensor, ...]


def delta_rows(inputs: Inputs, params: Inputs, states: torch.Tensor, step: RowSteps) -> torch.Tensor:
    """[R, H, V] for decode rows.

    Args:
        inputs: v [R, H, V], q and k [R, H, K], log and beta [R, H].
        params: none.
        states: [S, H, K, V], updated.
    """
    v, q, k, log, beta = inputs
    state = step.load(states).float() * torch.exp(log).view(*log.shape, 1, 1)
    correction = (v - (k.unsqueeze(2) @ state).squeeze(2)) * beta.unsqueeze(2)
    state = state + k.unsqueeze(3) * correction.unsqueeze(2)
    store(states, step.states, state)
    return (q.unsqueeze(2) @ state).squeeze(2)


def delta_tiles(inputs: Inputs, params: Inputs, states: torch.Tensor, tiles: TileSteps) -> torch.Tensor:
    """[C, H, V] for tokens of chunks; arguments as for rows, C tokens instead of R."""
    v, q, k, log, beta = (tiles.tiled(each).transpose(1, 2) for each in inputs)
    log = log.cumsum(dim=2)  # [NT, H, Q]
    decay, grown = decays(log), torch.exp(log).unsqueeze(3)
    weighted = k * beta.unsqueeze(3)
    inverse = unit_lower_inverse((weighted @ k.transpose(2, 3) * decay).tril(-1))
    new = inverse @ (v * beta.unsqueeze(3))  # [NT, H, Q, V]
    seen = inverse @ (weighted * grown)  # [NT, H, Q, K]
    whole = log[..., -1:]
    kept = (k * torch.exp(whole - log).unsqueeze(3)).transpose(2, 3)  # [NT, H, K, Q]
    identity = torch.eye(k.shape[3], dtype=k.dtype, device=k.device)
    begin = chain_tiles(torch.exp(whole).unsqueeze(3) * identity - kept @ seen, kept @ new, states, tiles, torch.matmul)
    out = (q * grown) @ begin + (q @ k.transpose(2, 3) * decay) @ (new - seen @ begin)
    return tiles.flat(out.transpose(1, 2))


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """[..., Q, Q] inverse of I + L, where L is ``strict`` [..., Q, Q], below the diagonal; Q is a power of two.

    Diagonal blocks of 1, 2, 4, ... are inverted in turn. Powers of L would need as many products, but grow like
    binomials before they cancel: of nearly equal keys nothing is left in float32.
    """
    size, lead = strict.shape[-1], strict.shape[:-2]
    blocks = torch.ones(*lead, size, 1, 1, dtype=strict.dtype, device=strict.device)
    width = 1
    while width < size:
        count = size // (2 * width)
        pairs = strict.view(*lead, count, 2 * width, count, 2 * width).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        upper, lower = blocks.view(*lead, count, 2, width, width).unbind(-3)
        corner = -(lower @ pairs[..., width:, :width] @ upper)
        top = torch.cat((upper, torch.zeros_like(upper)), dim=-1)
        blocks = torch.cat((top, torch.cat((corner, lower), dim=-1)), dim=-2)
        width *= 2
    return blocks.squeeze(-3)
