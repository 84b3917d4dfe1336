"""Chains of affine maps: how a state passes from one tile of tokens to the next.

A tile turns the state S before it into ``A S + B``. A is a number, a diagonal or a matrix, by the kind of layer. The
states after all tiles follow by doubling, in log2(tiles) steps that each compose maps with those 1, 2, 4, ... tiles
before them. The first tile of a request gets ``A = 0`` and ``B + A S``, S its state from before the step: no state
passes from a request to the next one.
"""

from collections.abc import Callable

import torch

from model_runner_base.models.recurrent.step import TileSteps, store

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scan(factors: torch.Tensor, terms: torch.Tensor, multiply: Multiply) -> torch.Tensor:
    """[N, ...] ``S[n] = A[n] S[n - 1] + B[n]``, where ``S[-1]`` is 0; ``factors`` [N, ...] are A, ``terms`` are B."""
    step = 1
    while step < factors.shape[0]:
        later = factors[step:]
        terms = torch.cat((terms[:step], terms[step:] + multiply(later, terms[:-step])))
        factors = torch.cat((factors[:step], multiply(later, factors[:-step])))
        step *= 2
    return terms


def chain(
    factors: torch.Tensor, terms: torch.Tensor, before: torch.Tensor, is_first: torch.Tensor, multiply: Multiply
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before and after each of N parts, [N, ...] both.

    Args:
        factors, terms: [N, ...] the map of each part.
        before: [N, ...] state from before the step, of each part's request.
        is_first: [N] bool, whether a part is its request's first.
    """
    is_first = is_first.view(-1, *[1] * (terms.dim() - 1))
    terms = torch.where(is_first, terms + multiply(factors, before), terms)
    after = scan(torch.where(is_first, 0, factors), terms, multiply)
    return torch.where(is_first, before, torch.cat((before[:1], after[:-1]))), after


def chain_tiles(
    factors: torch.Tensor, terms: torch.Tensor, states: torch.Tensor, tiles: TileSteps, multiply: Multiply
) -> torch.Tensor:
    """[NT, ...] states before each tile, from ``states`` [S, ...], where the states after the step are written."""
    begin, after = chain(factors, terms, tiles.load(states).float(), tiles.is_first, multiply)
    store(states, tiles.written, after)
    return begin
