"""Sampler: from logits to tokens, with static shapes and no branch on data.

The order is vLLM's: temperature, min-p, top-k, top-p (over the tokens that top-k kept), draw. A greedy request takes
the maximum of the unchanged logits. Where values tie at a threshold, all of them are kept. A device that cannot sort a
vocabulary caps every request's top-k (``SortLimits.max_candidates``). The cap acts as one more top-k, so draws among
the candidates stay the same. Parameters of every request row stay on the device (``SamplingStates``), and are copied
only when a row changes.

A rank has whole logits, or a shard of them, cut over the ranks that share the vocabulary (``CutVocabulary``).
Noise is a hash of seed, position and token, so a rank draws for its own tokens the noise that they have in a whole row.
If nothing else needs whole rows, the ranks exchange only their best tokens and the values that the cut-offs need of
whole rows. That is a few numbers a row instead of the vocabulary.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch
from torch.nn import functional
from vllm.sampling_params import SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.graph_policy import SortLimits, StepFunction, WrapFunction
from model_runner_base.step.request_states import NO_TOKEN, commit

GREEDY_TEMPERATURE = 1e-5
"""Temperature below which a request is greedy, as in vLLM."""


class SamplingMode(IntEnum):
    """Sampling work that a request needs, from cheap to expensive; a batch uses the most expensive of its requests."""

    GREEDY = 0
    RANDOM = 1
    """Temperature, min-p, seeds."""
    SORTED = 2
    """Also top-k or top-p, which sort the vocabulary."""


class SamplingStates:
    """Two tables with a row for each request row, and a last greedy row for padding.

    Floats [rows, 3]: temperature, top-p, min-p. Ints [rows, 3]: top-k (the vocabulary's size if off), low and high half
    of the seed. A request without a seed gets one from a generator that starts at ``seed``. Unless ``applies_min_p``,
    min-p stays off, because a logits processor applies it.
    """

    def __init__(
        self, max_num_reqs: int, vocab_size: int, seed: int, device_ops: DeviceOps, applies_min_p: bool = True
    ) -> None:
        self.vocab_size = vocab_size
        self.applies_min_p = applies_min_p
        self.device_ops = device_ops
        self.floats = np.zeros((max_num_reqs + 1, 3), np.float32)
        self.ints = np.zeros((max_num_reqs + 1, 3), np.int32)
        self.ints[:, 0] = vocab_size
        self.floats[:, 1] = 1.0
        self.modes = np.zeros(max_num_reqs + 1, np.int8)
        self._greedy = (0.0, 1.0, 0.0), (vocab_size, 0, 0)
        self._values = [self._greedy] * max_num_reqs
        """Contents of both tables by row, to see whether a new request changes them."""
        self._random = random.Random(seed)
        self._device: tuple[torch.Tensor, torch.Tensor] | None = None

    def admit(self, row: int, params: SamplingParams, seed: int) -> None:
        # Other parameters do not matter to a greedy row. All greedy rows are alike, so a new one seldom changes tables.
        mode, values = SamplingMode.GREEDY, self._greedy
        if params.temperature >= GREEDY_TEMPERATURE:
            top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
            is_sorted = params.top_p < 1.0 or top_k < self.vocab_size
            mode = SamplingMode.SORTED if is_sorted else SamplingMode.RANDOM
            low, high = np.array([seed & (1 << 64) - 1], np.uint64).view(np.int32).tolist()
            min_p = params.min_p if self.applies_min_p else 0.0
            values = (params.temperature, params.top_p, min_p), (top_k, low, high)
        self.modes[row] = mode
        if self._values[row] != values:
            self._values[row] = values
            self.floats[row], self.ints[row] = values
            self._device = None

    def draw_seed(self) -> int:
        return self._random.getrandbits(63)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tables on the device."""
        if self._device is None:
            self._device = self.device_ops.to_device(self.floats), self.device_ops.to_device(self.ints)
        return self._device


def likeliest(values: torch.Tensor, count: int, max_width: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the ``count`` largest numbers of each row, largest first, and their places: [S, count], int32.

    Args:
        values: [S, V] float, V >= count.
        max_width: the longest row that may be searched at a time, at least twice ``count``; None: any length. Longer
            rows are cut into pieces of one length, and the largest numbers of all pieces are searched again. Places are
            integers throughout, so they are exact in vocabularies of any size.
    """
    if max_width is None or values.shape[1] <= max_width:
        top, places = values.topk(count, dim=-1)
        return top, places.to(torch.int32)
    # Forbidden tokens are raised from -inf to the lowest finite number, so that padding, which is -inf, comes last.
    lowest = torch.finfo(values.dtype).min
    top, places = _by_pieces(values.clamp(min=lowest), count, max_width)
    return torch.where(top == lowest, float("-inf"), top), places


def _by_pieces(values: torch.Tensor, count: int, max_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what ``likeliest`` does, for rows without -inf; only the padding that it adds is -inf."""
    num_logits, width = values.shape
    if width <= max_width:
        top, places = values.topk(count, dim=-1)
        return top, places.to(torch.int32)
    num_pieces = -(-width // max_width)
    piece = -(-width // num_pieces)
    padded = functional.pad(values, (0, num_pieces * piece - width), value=float("-inf"))
    top, places = padded.reshape(num_logits * num_pieces, piece).topk(count, dim=-1)
    starts = torch.arange(num_pieces, dtype=torch.int32, device=values.device) * piece
    places = (places.to(torch.int32).view(num_logits, num_pieces, count) + starts.view(1, -1, 1)).view(num_logits, -1)
    top, among = _by_pieces(top.view(num_logits, -1), count, max_width)
    return top, places.gather(-1, among.long())


_LOW_BITS = 12


class Vocabulary:
    """The whole vocabulary on every rank: a step returns whole rows."""

    start = 0
    """Token that the first column of the rows belongs to."""

    def modes(self, sort_limits: SortLimits) -> tuple[SamplingMode, ...]:
        """Sampling modes that work on shards of logits."""
        return ()

    def gatherer(self, wrap: WrapFunction) -> StepFunction:
        """Returns ``whole`` as a function to call between graphs."""
        return self.whole

    def own(self, logits: torch.Tensor) -> torch.Tensor:
        """Makes this rank's rows from the logits that its model computed; float32, as all values here."""
        return logits

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Makes whole rows [S, V], the same on every rank."""
        return own

    # ---- For rows that ``own`` made, or values of their shape ----

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest value of each row, [S, 1]."""
        return values.amax(dim=-1, keepdim=True)

    def largest(self, values: torch.Tensor, count: int, max_width: int | None) -> torch.Tensor:
        """The ``count`` largest values of each row, or all if it has fewer, largest first (see ``likeliest``)."""
        return likeliest(values, min(count, values.shape[-1]), max_width)[0]

    def argmax(self, values: torch.Tensor) -> torch.Tensor:
        """The token of the largest value of each row, the first one if several are equal, [S] int32.

        NO_TOKEN if all values are -inf or one is NaN.
        """
        tokens = values.argmax(dim=-1, keepdim=True)
        return _unless_forbidden(tokens, values.gather(-1, tokens))


@dataclass(frozen=True)
class CutVocabulary(Vocabulary):
    """The rank's ``width`` tokens from ``start`` on, of ``size`` in all; the last ranks' parts may end in padding."""

    start: int = field()
    width: int
    num_ranks: int
    size: int
    all_gather: Callable[[torch.Tensor], torch.Tensor]
    """[S, n] to [S, num_ranks * n]: the ranks' values next to one another, in the order of their tokens."""

    def modes(self, sort_limits: SortLimits) -> tuple[SamplingMode, ...]:
        """Sampling modes that work on shards of logits.

        A sort needs whole rows, unless candidates are capped: then each rank has few of them to exchange.
        """
        return tuple(mode for mode in SamplingMode if mode != SamplingMode.SORTED or sort_limits.max_candidates)

    def gatherer(self, wrap: WrapFunction) -> StepFunction:
        return wrap(self.whole, [])

    def own(self, logits: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(self.width, dtype=torch.int32, device=logits.device) + self.start
        return torch.where(tokens < self.size, logits, float("-inf"))

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        return self.all_gather(own)[:, : self.size]

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return super().maximum(self.all_gather(super().maximum(values)))

    def largest(self, values: torch.Tensor, count: int, max_width: int | None) -> torch.Tensor:
        found = self.all_gather(super().largest(values, count, max_width))
        return super().largest(found, min(count, self.size), max_width)

    def argmax(self, values: torch.Tensor) -> torch.Tensor:
        # Tokens are sent in two halves: each is exact in float32, in vocabularies of any size.
        tokens = values.argmax(dim=-1).to(torch.int32) + self.start
        halves = tokens >> _LOW_BITS, tokens & ((1 << _LOW_BITS) - 1)
        best = torch.stack((values.amax(dim=-1), *(half.to(torch.float32) for half in halves)), dim=-1)
        every = self.all_gather(best).view(-1, self.num_ranks, 3)
        winner = every[..., 0].argmax(dim=-1, keepdim=True)
        value = every[..., 0].gather(-1, winner)
        high, low = (every[..., part].gather(-1, winner).squeeze(-1).to(torch.int32) for part in (1, 2))
        return _unless_forbidden((high * (1 << _LOW_BITS) + low).unsqueeze(-1), value)


def _unless_forbidden(tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[S] int32 from ``tokens`` [S, 1]: NO_TOKEN where the token's value in ``values`` [S, 1] is -inf or NaN."""
    return torch.where(values > float("-inf"), tokens, NO_TOKEN).squeeze(-1).to(torch.int32)


WHOLE = Vocabulary()


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
    sample_slots: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    *device_rows: torch.Tensor,
    vocabulary: Vocabulary = WHOLE,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Samples one token a logits row and records it in ``DeviceRows``, in place.

    Args:
        logits: [S, V] float32, or this rank's part if ``vocabulary`` is cut.
        sample_slots: [2, S] int32: the request row of each logits row (the padding row if its token is not recorded),
            and the position of its token. Where drafts are verified [3, S]: also the draft for that position.
        floats, ints: the tables of ``SamplingStates``.
        device_rows: the tensors of ``DeviceRows``.
        vocabulary: a vocabulary whose ``modes`` include ``mode``, or WHOLE.

    Returns:
        Token ids [S] int32, -1 for tokens sampled after a wrong draft. If ``returns_logits``, also the logits [S, V]
        that they were drawn from: divided by the temperature, -inf where a token was cut off.
    """
    tokens, scaled = draw(mode, sort_limits, logits, sample_slots[0], sample_slots[1], floats, ints, vocabulary)
    tokens = commit(device_rows, sample_slots, tokens)
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
    is_candidate = ((before < top_p) | (top_p >= 1.0)) & (ordered >= floor)
    return ordered.gather(-1, is_candidate.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
