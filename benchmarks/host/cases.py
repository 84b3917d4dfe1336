"""Cases of ``benchmarks.host.step``, with targets of the race against vLLM's first runner."""

from dataclasses import dataclass
from typing import Any

FEATURES: dict[str, Any] = {
    "temperature": 0.8,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logprobs": 5,
}
"""Options of every request in a case with features; each request also has a seed of its own."""

PROMPT_LENGTH = 512
"""Tokens of the prompts that arrive in every step of a mixed case."""


@dataclass(frozen=True)
class Case:
    """Kind of the steps that are timed, and the targets."""

    num_decodes: int
    target: float
    """Target of the runner's ratio."""
    is_async: bool = False
    has_features: bool = False
    num_prefills: int = 0
    sum_target: float | None = None
    """Target of the ratio of scheduler and runner together."""

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefills * PROMPT_LENGTH


TARGETS = {1: 7, 8: 7, 64: 8, 256: 12, 1024: 16}
ASYNC_TARGETS = {1: 7, 8: 7, 64: 10, 256: 16, 1024: 30}
SUM_TARGETS = {1: 4, 64: 6, 256: 8, 1024: 10}
CASES = {
    **{f"decode_{n}": Case(n, target, sum_target=SUM_TARGETS.get(n)) for n, target in TARGETS.items()},
    "mixed": Case(252, 4, num_prefills=4),
    **{f"decode_{n}_features": Case(n, 3, has_features=True) for n in (64, 256)},
    **{
        f"decode_{n}_async": Case(n, target, is_async=True, sum_target=SUM_TARGETS.get(n))
        for n, target in ASYNC_TARGETS.items()
    },
    "mixed_async": Case(252, 4, is_async=True, num_prefills=4),
}
