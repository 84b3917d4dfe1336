"""Operations along a request that recurrent layers share: chains of affine maps, and short causal convolutions.

A chain says how a state passes from one tile of tokens to the next. A tile turns the state S before it into
``A S + B``. A is a number, a diagonal or a matrix, by the kind of layer. The states after all tiles follow by doubling,
in log2(tiles) steps that each compose maps with those 1, 2, 4, ... tiles before them. The first tile of a request gets
``A = 0`` and ``B + A S``, S its state from before the step: no state passes from a request to the next one.

A convolution has one filter a channel: ``sum over k of weight[d, K - 1 - k] * x[t - k, d]``, as torch's
``Conv1d(groups=D, padding=K - 1)`` has it. The state of a request are its last K - 1 inputs, oldest first, in the
model's dtype.
"""

from collections.abc import Callable

import torch

from model_runner_base.models.recurrent.step import DecodeSteps, RecurrentStep, TileSteps, store

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


def convolve_rows(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, step: DecodeSteps) -> torch.Tensor:
    """[R, D] float32 for decode rows ``x`` [R, D]; ``weight`` [D, K] float32; ``states`` [S, K - 1, D] are updated."""
    window = torch.cat((step.load(states), x.unsqueeze(1)), dim=1)
    store(states, step.states, window[:, 1:])
    return (window.float() * weight.T).sum(dim=1)


def convolve_tiles(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, tiles: TileSteps) -> torch.Tensor:
    """[C, D] float32 for tokens of chunks ``x`` [C, D]; what precedes a request's first token comes from its state."""
    num_tokens, taps = x.shape[0], weight.shape[1]
    pool = torch.cat((x, tiles.load(states).flatten(0, 1)))
    # Tokens of padding come after all others and belong to no tile: any index that exists does for them.
    last = pool.shape[0] - 1

    def place(token: torch.Tensor, begin: torch.Tensor, tile: torch.Tensor, back: int) -> torch.Tensor:
        """Index in the pool of the input ``back`` tokens before each token."""
        index = token - back
        in_state = num_tokens + (tile + 1) * (taps - 1) + index - begin
        return torch.where(index >= begin, index, in_state).clamp(0, last)

    token = torch.arange(num_tokens, dtype=torch.int32, device=x.device)
    begin = tiles.begins[tiles.tile_of]
    out = x.float() * weight[:, -1]
    for back in range(1, taps):
        out = out + pool[place(token, begin, tiles.tile_of, back)] * weight[:, taps - 1 - back]
    tile = torch.arange(tiles.states.shape[0], dtype=torch.int32, device=x.device)
    last_inputs = [place(tiles.ends, tiles.begins, tile, back) for back in range(taps - 2, -1, -1)]
    store(states, tiles.written, pool[torch.stack(last_inputs, dim=1)])
    return out


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, step: RecurrentStep
) -> torch.Tensor:
    """[T, D] for all tokens of a step, decode rows first; ``weight`` [D, 1, K]."""
    # Sums are of float32, and rounded once.
    kernel = weight.flatten(1).float()
    out = step.run(
        (x,),
        lambda values, rows: convolve_rows(values[0], kernel, states, rows),
        lambda values, tiles: convolve_tiles(values[0], kernel, states, tiles),
    )
    return (out if bias is None else out + bias.float()).to(x.dtype)
