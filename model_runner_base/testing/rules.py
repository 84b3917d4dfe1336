"""The documented rules of ``SamplingParams`` in NumPy, float64, one request at a time: an independent reference.

The order is that of the docstring of vLLM's sampler: allowed tokens, bad words, min tokens, logit bias, custom logits
processors that may change the maximum, penalties, temperature, min-p, top-k, top-p.
"""

from collections.abc import Callable, Sequence

import numpy as np
from vllm import SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Temperature below which a request is greedy."""

Array = np.ndarray
Processor = Callable[[Array, list[int], list[int]], Array]
"""Function from logits [V], prompt and output tokens to logits [V]."""


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_TEMPERATURE


def processed(
    logits: Array,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    processors: Sequence[Processor] = (),
) -> Array:
    """Logits [V] float64 after every rule that may change the maximum; forbidden tokens are -inf.

    Args:
        stop_ids: tokens that end the request in addition to ``params.stop_token_ids``: the end-of-sequence token.
        bad_words: the token sequences of ``params.bad_words``.
    """
    logits = np.array(logits, np.float64)
    output = list(output)
    if params.allowed_token_ids is not None:
        forbidden = np.ones(len(logits), bool)
        forbidden[params.allowed_token_ids] = False
        logits[forbidden] = -np.inf
    for word in bad_words:
        *prefix, last = word
        if output[len(output) - len(prefix) :] == prefix:
            logits[last] = -np.inf
    if len(output) < params.min_tokens:
        logits[[*stop_ids, *(params.stop_token_ids or [])]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for processor in processors:
        logits = processor(logits, list(prompt), output)
    return _penalized(logits, params, prompt, output)


def _penalized(logits: Array, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Array:
    counts = np.bincount(np.asarray(output, int), minlength=len(logits))
    seen = counts > 0
    seen[list(prompt)] = True
    penalty = params.repetition_penalty
    logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def truncated(
    logits: Array, params: SamplingParams, slack: float = 0.0, processors: Sequence[Callable[[Array], Array]] = ()
) -> Array:
    """Logits [V] after temperature, min-p, top-k and top-p; those of excluded tokens are -inf.

    ``slack`` widens each threshold a little, since rounding in float32 may put a token on its other side.
    ``processors`` are the custom ones that leave the maximum alone.
    """
    scaled = logits / params.temperature
    probabilities = softmax(scaled)
    scaled = np.where(probabilities >= params.min_p * probabilities.max() * (1 - slack), scaled, -np.inf)
    for processor in processors:
        scaled = processor(scaled)
    if 0 < params.top_k < len(scaled):
        scaled = np.where(scaled >= np.sort(scaled)[-params.top_k] - slack, scaled, -np.inf)
    order = np.argsort(-scaled, kind="stable")
    ordered = softmax(scaled)[order]
    before = np.cumsum(ordered) - ordered
    scaled[order[before >= params.top_p + slack]] = -np.inf
    return scaled


def softmax(logits: Array) -> Array:
    """Probabilities [..., V]."""
    return np.exp(log_softmax(logits))


def log_softmax(logits: Array) -> Array:
    """Log-probabilities [..., V]; -inf stays -inf."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def rank(values: Array, token: int, slack: float = 0.0) -> tuple[int, int]:
    """The lowest and the highest rank, from 1, that a token may have where values within ``slack`` count as equal."""
    return int((values > values[token] + slack).sum()) + 1, int((values >= values[token] - slack).sum())
