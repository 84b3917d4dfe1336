"""Attention in pieces: pairs are worked through so many at a time, and their partial results are merged as they come.

A pair's keys and values take thousands of times the memory of a query, so a step that holds those of all pairs takes
memory for whatever the limits allow. A piece holds a fixed number of pairs. Between two pieces only the online-softmax
state of every query is kept (arXiv:2205.14135): the largest score so far, and sums relative to it.

    new maximum = max(maximum, those of the piece)
    out         = out * exp(maximum - new maximum)
                  + sum over the piece's pairs of their out * exp(their maximum - new maximum)

What a pair adds to its query tile reaches no other tile, not even a NaN. Pieces follow each other in a loop
(step/rounds.py), which ends with the last piece that has a pair. So padding costs nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from model_runner_base.attention.metadata import NEVER, PairPlan
from model_runner_base.attention.plan import FAR
from model_runner_base.step.rounds import State, is_traced, run_rounds

MASK_VALUE = -1e30
LEAST_LOGARITHM = -60.0
"""Number whose exponential, 9e-27, adds nothing to a sum of float32 numbers of which the largest is 1, and makes normal
numbers of products with others."""
MAX_DIAGONAL_KV_HEADS = 8
"""Largest number of KV heads for which one product over all heads costs less than one product per head, although most
of it is with zeros."""


class Partial(NamedTuple):
    """Attention over some of the keys, float32: unnormalised outputs [N, K, R, V], and by row the largest score and the
    sum of exponentials, [N, K, R, 1].

    N pairs or query tiles, K KV heads, R rows: query tokens times heads of a group; V head size of values.
    """

    out: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor


@dataclass(frozen=True)
class PairShape:
    """Sizes of a layer's heads, on which the memory of its pairs depends."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    """Head size of keys or of values, whichever is larger."""
    num_halves: int = 2
    """2 for keys and values; 1 where one row of a cache is both, as with latents."""

    def numbers(self, query: int, keys: int, is_decode: bool) -> int:
        """Largest number of float32 numbers that a pair of ``query`` tokens and ``keys`` cache positions takes.

        Keys and values are counted twice, since they are gathered and then masked or transposed; scores four times;
        queries and outputs three times, for all KV heads where those of decode rows are laid out block-diagonally.
        """
        heads = self.num_kv_heads if is_decode and self.num_kv_heads <= MAX_DIAGONAL_KV_HEADS else 1
        gathered = 2 * keys * self.num_halves * self.num_kv_heads * self.head_size
        return gathered + query * self.num_heads * (4 * keys + 3 * heads * self.head_size)


def attend_in_pieces(
    attend: Callable[[torch.Tensor, torch.Tensor, PairPlan], Partial],
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: PairPlan,
    shape: Sequence[int],
) -> Partial:
    """Attention of all query tiles, ``plan.piece`` pairs at a time.

    ``attend`` makes the partial results of the pairs of a plan, from ``query`` and ``kv_cache``. ``shape`` is that of
    the outputs, [NT, K, R, V].
    """

    def add(state: State, part: PairPlan, reads: State) -> State:
        return tuple(_add(Partial(*state), attend(reads[0], reads[1], part), part.pair_tile))

    return Partial(*run_pieces(add, tuple(_empty(shape, query.device)), (query, kv_cache), plan))


def run_pieces(
    add: Callable[[State, PairPlan, State], State], state: State, reads: Sequence[torch.Tensor], plan: PairPlan
) -> State:
    """Runs ``add`` for each piece of a plan's pairs, as a loop.

    ``add`` takes the state, a plan with the pairs of the piece, and the tensors that it reads, which are ``reads``. It
    returns the next state. Pairs after the plan's last one see nothing.
    """
    assert plan.pair_start is not None
    names = [
        name for name in ("pair_tile", "pair_start", "pair_blocks", "last", "first") if getattr(plan, name) is not None
    ]
    arrays = [getattr(plan, name) for name in names]
    if torch.compiler.is_dynamo_compiling():
        arrays = [array.clone() for array in arrays]  # Torch's loop takes no tensors that share memory.
    chosen = () if plan.chosen is None else (plan.chosen,)
    num_reads, num_pairs, size = len(reads), plan.pair_tile.shape[0], plan.piece

    def body(piece: torch.Tensor, state: State, reads: State) -> State:
        arrays = reads[num_reads : num_reads + len(names)]
        index = piece * size + torch.arange(size, dtype=torch.int32, device=piece.device)
        is_pair, index = index < num_pairs, index.clamp(max=num_pairs - 1)
        of_piece: dict[str, Any] = {name: array[index] for name, array in zip(names, arrays, strict=True)}
        part = replace(plan, merge_tree=[], chosen=next(iter(reads[num_reads + len(names) :]), None), **of_piece)
        part.last = torch.where(is_pair.unsqueeze(1), part.last, NEVER)
        return add(state, part, reads[:num_reads])

    rounds = ((plan.pair_start < FAR).sum(dtype=torch.int32) + (size - 1)) // size
    return run_rounds(rounds, -(-num_pairs // size), body, state, (*reads, *arrays, *chosen))


def _add(state: Partial, piece: Partial, pair_tile: torch.Tensor) -> Partial:
    """Adds the partial results of a piece's pairs to those of the query tiles ``pair_tile`` [P]; either may be
    overwritten."""
    if pair_tile.is_cpu and not is_traced():
        return _add_in_place(state, piece, pair_tile)
    maximum, state_scale, piece_scale = _scales(state, piece, pair_tile)
    out = (state.out * state_scale).index_add_(0, pair_tile, piece.out * piece_scale)
    total = (state.total * state_scale).index_add_(0, pair_tile, piece.total * piece_scale)
    return Partial(out, maximum, total)


def _add_in_place(state: Partial, piece: Partial, pair_tile: torch.Tensor) -> Partial:
    """Adds as ``_add`` does, and touches only tiles from the first to the last that the piece has."""
    begin, end = int(pair_tile.amin()), int(pair_tile.amax()) + 1
    tiles, tile_of = Partial(*(each[begin:end] for each in state)), pair_tile - begin
    maximum, state_scale, piece_scale = _scales(tiles, piece, tile_of)
    tiles.out.mul_(state_scale).index_add_(0, tile_of, piece.out.mul_(piece_scale))
    tiles.total.mul_(state_scale).index_add_(0, tile_of, piece.total.mul_(piece_scale))
    tiles.maximum.copy_(maximum)
    return state


def _scales(state: Partial, piece: Partial, pair_tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest score of each query tile in ``state``, with those of a piece's pairs; and what the sums of ``state`` and
    those of the piece are multiplied by, so that both are relative to it."""
    number = torch.arange(state.out.shape[0], dtype=torch.int32, device=pair_tile.device).view(-1, 1, 1)
    is_of = number == pair_tile.view(1, -1, 1)
    largest = torch.where(is_of, piece.maximum.flatten(1), MASK_VALUE).amax(dim=1).view_as(state.maximum)
    maximum = torch.maximum(state.maximum, largest)
    return maximum, exp(state.maximum - maximum), exp(piece.maximum - maximum[pair_tile])


def merge(partial: Partial, pair_tile: torch.Tensor, shape: Sequence[int]) -> Partial:
    """Merges the partial results of pairs into those of their query tiles, whose outputs have ``shape``.

    Each output is read once. A tree of sums would not do: a compiler fuses its levels, and then takes a pair's output
    again for every node above it.
    """
    return _add(_empty(shape, partial.out.device), partial, pair_tile)


def _empty(shape: Sequence[int], device: torch.device) -> Partial:
    """State of query tiles that have seen nothing."""
    zeros = torch.zeros(shape, dtype=torch.float32, device=device)
    total = zeros[..., :1].clone()
    return Partial(zeros, total + MASK_VALUE, total)


def exp(x: torch.Tensor) -> torch.Tensor:
    """Exponential of numbers up to 0; of those below ``LEAST_LOGARITHM`` it is that of ``LEAST_LOGARITHM``.

    Libraries of processors take thirty to eighty times as long for a result that is 0 or subnormal. A NaN stays one,
    which the clamp of some compilers would replace.
    """
    return torch.exp(torch.where(x < LEAST_LOGARITHM, LEAST_LOGARITHM, x) if is_traced() else x.clamp(LEAST_LOGARITHM))
