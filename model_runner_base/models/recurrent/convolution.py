"""Short causal convolutions along a request, one filter a channel.

Output: ``sum over k of weight[d, K - 1 - k] * x[t - k, d]``, as torch's ``Conv1d(groups=D, padding=K - 1)`` has it. The
state of a request are its last K - 1 inputs, oldest first, in the model's dtype.
"""

import torch

from model_runner_base.models.recurrent.step import RecurrentStep, RowSteps, TileSteps, store


def convolve_rows(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, step: RowSteps) -> torch.Tensor:
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
    kept = [place(tiles.ends, tiles.begins, tile, back) for back in range(taps - 2, -1, -1)]
    store(states, tiles.written, pool[torch.stack(kept, dim=1)])
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
