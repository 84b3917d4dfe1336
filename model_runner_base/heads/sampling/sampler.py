"""The sampler: from logits to tokens, with static shapes and no branch on data.

The order is vLLM's: temperature, min-p, top-k, top-p (over the tokens that top-k kept), draw. A greedy request takes
the maximum of the unchanged logits. Where values tie at a threshold, all of them are kept. A device that cannot sort a
vocabulary caps every request's top-k (``SortLimits.max_candidates``). The cap acts as one more top-k, so draws among
the candidates stay the same.
"""

import torch

from model_runner_base.heads.sampling.params import GREEDY_TEMPERATURE, SamplingMode
from model_runner_base.heads.sampling.vocabulary import WHOLE, Vocabulary
from model_runner_base.step.device_rows import commit
from model_runner_base.step.graph_policy import SortLimits

_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts int32 logically.

    The sign bit is moved separately, because ``>>`` of a negative number keeps the sign, and some devices divide and
    round instead.
    """
    return ((x & 0x7FFFFFFF) >> bits) | ((x < 0).to(torch.int32) * (1 << (31 - bits)))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 16)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 15)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 16)


def gumbel_noise(
    seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor, count: int, start: int = 0
) -> torch.Tensor:
    """Standard Gumbel noise [S, count] float32 for ``count`` tokens from ``start`` on; the arguments are [S] int32.

    Adding it to logits and taking the maximum draws from their softmax (Gumbel-max trick).

    The noise is counter-based: it depends on a request's seed and position alone.

    No generator state is kept, so a request's draws stay the same if its row changes, if it is preempted or chunked,
    and whatever it is batched with. The mixing function is the 32-bit "lowbias32" finaliser of Chris Wellons'
    hash-prospector (public domain), applied once for each of seed, position and token id. All arithmetic is elementwise
    int32.
    """
    stream = _mix(_mix(seed_low) ^ seed_high)
    stream = _mix(stream ^ (position * _GOLDEN))
    index = torch.arange(count, dtype=torch.int32, device=position.device) + start
    bits = _mix(_mix(stream.view(-1, 1) ^ (index.view(1, -1) * _GOLDEN)) + stream.view(-1, 1))
    return _gumbel(bits)


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel values from random int32 bits; finite for all of them.

    23 bits and a half fit float32's 24-bit mantissa exactly, so the uniform value never rounds to 1.
    """
    uniform = (_shift_right(bits, 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def sample(
    mode: SamplingMode,
    returns_logits: bool,
    sort_limits: SortLimits,
    logits: torch.Tensor,
    slots: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    *device_rows: torch.Tensor,
    vocabulary: Vocabulary = WHOLE,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Samples one token a row of logits and records it in ``DeviceRows``, in place.

    Args:
        logits: [S, V] float32, or this rank's part if ``vocabulary`` is cut.
        slots: [2, S] int32: the request row of each logits row (the padding row if its token is not recorded), and the
            position of its token. Where drafts are verified [3, S]: also the draft for that position.
        floats, ints: the tables of ``SamplingStates``.
        device_rows: the tensors of ``DeviceRows``.
        vocabulary: a vocabulary whose ``modes`` include ``mode``, or WHOLE.

    Returns:
        Token ids [S] int32, -1 for tokens sampled after a wrong draft. If ``returns_logits``, also the logits [S, V]
        that they were drawn from: divided by the temperature, -inf where a token was cut off.
    """
    tokens, scaled = draw(mode, sort_limits, logits, slots[0], slots[1], floats, ints, vocabulary)
    tokens = commit(device_rows, slots, tokens)
    # Cloned: in a greedy batch these are the graph's input, and a graph must not return its input.
    return (tokens, scaled.clone()) if returns_logits else tokens


def draw(
    mode: SamplingMode,
    sort_limits: SortLimits,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws tokens [S] int32 for request ``rows`` [S] at ``positions`` [S]; also returns the logits drawn from."""
    candidates = scaled = logits
    if mode != SamplingMode.GREEDY:
        temperature, top_p, min_p = floats[rows].unsqueeze(-1).unbind(1)
        top_k, seed_low, seed_high = ints[rows].unbind(1)
        is_greedy = temperature < GREEDY_TEMPERATURE
        scaled = logits / torch.where(is_greedy, 1.0, temperature)
        floor = vocabulary.maximum(scaled) + torch.log(min_p)
        if mode == SamplingMode.SORTED or sort_limits.max_candidates is not None:
            ordered = _descending(scaled, sort_limits, vocabulary)
            floor = torch.maximum(floor, _sorted_floor(ordered, floor, top_k.unsqueeze(-1), top_p))
        scaled = torch.where((scaled >= floor) | is_greedy, scaled, float("-inf"))
        noise = gumbel_noise(seed_low, seed_high, positions, logits.shape[-1], vocabulary.start)
        candidates = torch.where(is_greedy, scaled, scaled + noise)
    return vocabulary.argmax(candidates), scaled


def _descending(logits: torch.Tensor, sort_limits: SortLimits, vocabulary: Vocabulary) -> torch.Tensor:
    """Logits of the candidates, largest first: [S, max_candidates], or [S, V] if all tokens are candidates."""
    if sort_limits.max_candidates is None:
        return logits.sort(dim=-1, descending=True).values
    return vocabulary.largest(logits, sort_limits.max_candidates, sort_limits.max_width)


def _sorted_floor(ordered: torch.Tensor, floor: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Smallest of the logits in ``ordered`` that min-p (``floor``), top-k and then top-p keep, [S, 1]."""
    top_k = top_k.clamp(max=ordered.shape[-1])
    floor = torch.maximum(floor, ordered.gather(-1, (top_k - 1).long()))
    probabilities = torch.where(ordered >= floor, ordered, float("-inf")).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = ((before < top_p) | (top_p >= 1.0)) & (ordered >= floor)
    return ordered.gather(-1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
