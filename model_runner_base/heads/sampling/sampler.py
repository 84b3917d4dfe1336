"""The sampler: from logits to tokens, with static shapes and no branch on data.

The order is vLLM's: temperature, min-p, top-k, top-p (over the tokens that top-k kept), draw. A greedy request takes
the maximum of the unchanged logits. Where values tie at a threshold, all of them are kept. A device that cannot sort a
vocabulary caps every request's top-k (``SortLimits.max_candidates``). The cap acts as one more top-k, so draws among
the candidates stay the same.
"""

import torch

from model_runner_base.heads.sampling.params import GREEDY_TEMPERATURE, SamplingMode
from model_runner_base.heads.sampling.random import gumbel_noise
from model_runner_base.heads.sampling.vocabulary import WHOLE, Vocabulary
from model_runner_base.step.device_rows import commit
from model_runner_base.step.graph_policy import SortLimits


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
