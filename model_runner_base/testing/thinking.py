"""Thinking budgets by brute force: the token that vLLM's rule forces, found by a look at all tokens."""

from collections.abc import Sequence

from model_runner_base.heads.sampling.thinking_budget import Markers
from model_runner_base.testing.models import TinyModel


def last(tokens: list[int], marker: Sequence[int]) -> int:
    """Index of the last marker, or -1."""
    places = [i for i in range(len(tokens)) if tokens[i : i + len(marker)] == list(marker)]
    return places[-1] if places else -1


def forced(tokens: list[int], markers: Markers, budget: int) -> int | None:
    """Token that vLLM's rule forces after ``tokens``; None if any may follow."""
    start = last(tokens, markers.start)
    if start <= last(tokens, markers.natural_end) or len(tokens) - start - len(markers.start) < budget:
        return None
    end = list(markers.forced_end)
    there = max(count for count in range(len(end)) if tokens[len(tokens) - count :] == end[:count])
    return end[there]


def thought(model: TinyModel, prompt: Sequence[int], markers: Markers, budget: int | None, count: int) -> list[int]:
    """``count`` greedy tokens, each the forced one or the likeliest."""
    tokens = list(prompt)
    for _ in range(count):
        token = None if budget is None else forced(tokens, markers, budget)
        tokens.append(model.greedy(tuple(tokens), 1)[0] if token is None else token)
    return tokens[len(prompt) :]
