"""Gated delta rule (Yang and others, 2024): a state that maps keys to values, corrected by what it gets wrong.

``S' = exp(log[t]) S[t - 1]``, ``S[t] = S' + k[t] (beta[t] (v[t] - S'^T k[t]))^T`` and ``y[t] = S[t]^T q[t]``, of H
heads with K x V numbers each. All float32. A decay is a number for each head, or for each channel of its keys (Kimi
Delta Attention, arXiv:2510.26692). Inside a tile the corrections solve a unit lower triangular system (the WY form of
the paper); across tiles the state passes by a map with the matrix ``exp(log) I - K^T W``.
"""

from collections.abc import Callable

import torch

from model_runner_base.models.recurrent.mamba import decays
from model_runner_base.models.recurrent.operations import chain_tiles
from model_runner_base.models.recurrent.step import DecodeSteps, TileSteps, store

Inputs = tuple[torch.Tensor, ...]
Products = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def delta_rows(inputs: Inputs, params: Inputs, states: torch.Tensor, step: DecodeSteps) -> torch.Tensor:
    """[R, H, V] for decode rows.

    Args:
        inputs: v [R, H, V], q and k [R, H, K], log and beta [R, H].
        params: none.
        states: [S, H, K, V], updated.
    """
    v, q, k, log, beta = inputs
    return channel_delta_rows((v, q, k, log.unsqueeze(2), beta), params, states, step)


def channel_delta_rows(inputs: Inputs, params: Inputs, states: torch.Tensor, step: DecodeSteps) -> torch.Tensor:
    """[R, H, V] for decode rows, as ``delta_rows``, with decays of channels: log [R, H, K]."""
    v, q, k, log, beta = inputs
    state = step.load(states).float() * torch.exp(log).unsqueeze(3)
    correction = (v - (k.unsqueeze(2) @ state).squeeze(2)) * beta.unsqueeze(2)
    state = state + k.unsqueeze(3) * correction.unsqueeze(2)
    store(states, step.states, state)
    return (q.unsqueeze(2) @ state).squeeze(2)


def delta_tiles(inputs: Inputs, params: Inputs, states: torch.Tensor, tiles: TileSteps) -> torch.Tensor:
    """[C, H, V] for tokens of chunks; arguments as for rows, C tokens instead of R."""
    v, q, k, log, beta = inputs
    return _tiles((v, q, k, log.unsqueeze(2), beta), states, tiles, _products)


def channel_delta_tiles(inputs: Inputs, params: Inputs, states: torch.Tensor, tiles: TileSteps) -> torch.Tensor:
    """[C, H, V] for tokens of chunks, with decays of channels; arguments as for rows, C tokens instead of R."""
    return _tiles(inputs, states, tiles, channel_products)


def _tiles(inputs: Inputs, states: torch.Tensor, tiles: TileSteps, products: Products) -> torch.Tensor:
    """[C, H, V] for decays [C, H, D] of which each is for K / D channels, and the products of tokens under them."""
    v, q, k, log, beta = (tiles.tiled(each).transpose(1, 2) for each in inputs)
    log, beta = log.cumsum(dim=2), beta.unsqueeze(3)  # [NT, H, Q, D] and [NT, H, Q, 1]
    grown, weighted = torch.exp(log), k * beta
    inverse = unit_lower_inverse(products(weighted, k, log).tril(-1))
    new = inverse @ (v * beta)  # [NT, H, Q, V]
    seen = inverse @ (weighted * grown)  # [NT, H, Q, K]
    whole = log[..., -1:, :]
    decayed_keys = (k * torch.exp(whole - log)).transpose(2, 3)  # [NT, H, K, Q]
    identity = torch.eye(k.shape[3], dtype=k.dtype, device=k.device)
    begin = chain_tiles(
        torch.exp(whole) * identity - decayed_keys @ seen, decayed_keys @ new, states, tiles, torch.matmul
    )
    out = (q * grown) @ begin + products(q, k, log) @ (new - seen @ begin)
    return tiles.flat(out.transpose(1, 2))


def _products(rows: torch.Tensor, columns: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    """[..., Q, Q] products of ``rows`` and ``columns`` [..., Q, K] under the decay from the column's token to the
    row's, 0 where that comes first; ``log`` [..., Q, 1] are logarithms of decays, summed up to each token."""
    return rows @ columns.transpose(-2, -1) * decays(log.squeeze(-1))


def channel_products(rows: torch.Tensor, columns: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    """[..., Q, Q] the same products with decays of channels, ``log`` [..., Q, K]; Q is a power of two.

    Pairs of blocks of 1, 2, 4, ... tokens are taken in turn. From a token of the first block to one of the second, the
    decay is that up to the first block's end, times that from there on. Neither grows, however strong the decays are,
    and each is applied before a product of matrices.
    """
    size, lead = rows.shape[-2], rows.shape[:-2]
    blocks = (rows * columns).sum(dim=-1).view(*lead, size, 1, 1)
    width = 1
    while width < size:
        count = size // (2 * width)
        logs = log.view(*lead, count, 2, width, -1)
        border = logs[..., 0, -1:, :]
        later = rows.view(*lead, count, 2, width, -1)[..., 1, :, :] * torch.exp(logs[..., 1, :, :] - border)
        earlier = columns.view(*lead, count, 2, width, -1)[..., 0, :, :] * torch.exp(border - logs[..., 0, :, :])
        upper, lower = blocks.view(*lead, count, 2, width, width).unbind(-3)
        top = torch.cat((upper, torch.zeros_like(upper)), dim=-1)
        blocks = torch.cat((top, torch.cat((later @ earlier.transpose(-2, -1), lower), dim=-1)), dim=-2)
        width *= 2
    return blocks.squeeze(-3)


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
