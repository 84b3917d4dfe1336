"""Custom logits processors, written as vLLM documents them, and what each does to one row, in NumPy.

A request asks for one by ``SamplingParams(extra_args={name: argument})``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class _ByRow(LogitsProcessor):
    """Keeps the argument of each row that asks for the processor."""

    name: str

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.arguments: dict[int, Any] = {}

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.arguments, batch_update, lambda params, prompt, output: (params.extra_args or {}).get(self.name)
        )


class Favour(_ByRow):
    """Adds 6 to one token's logit."""

    name = "favour"

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self.arguments.items():
            logits[row, token] += 6.0
        return logits


class KeepTop(_ByRow):
    """Excludes all but the few most likely tokens."""

    name = "keep_top"

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, count in self.arguments.items():
            floor = logits[row].topk(count).values[-1]
            logits[row] = torch.where(logits[row] >= floor, logits[row], float("-inf"))
        return logits


class Flatten(_ByRow):
    """Multiplies the logits by a factor."""

    name = "flatten"

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, factor in self.arguments.items():
            logits[row] *= factor
        return logits


class NeverAgain(AdapterLogitsProcessor):
    """Forbids the tokens of the prompt and the last few output tokens, with a function for each request."""

    name = "never_again"

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        count = (params.extra_args or {}).get(self.name)
        if count is None:
            return None

        def process(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            forbidden = [*prompt, *output[-count:]]
            logits[forbidden] = float("-inf")
            return logits

        return process


def favour(token: int) -> Callable[[np.ndarray, list[int], list[int]], np.ndarray]:
    return lambda logits, prompt, output: logits + 6.0 * (np.arange(len(logits)) == token)


def keep_top(count: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda logits: np.where(logits >= np.sort(logits)[-count], logits, -np.inf)


def flatten(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda logits: logits * factor


def never_again(count: int) -> Callable[[np.ndarray, list[int], list[int]], np.ndarray]:
    def process(logits: np.ndarray, prompt: list[int], output: list[int]) -> np.ndarray:
        logits = logits.copy()
        logits[[*prompt, *output[-count:]]] = -np.inf
        return logits

    return process


PROCESSORS: list[str | type[LogitsProcessor]] = [Favour, KeepTop, Flatten, f"{__name__}:NeverAgain"]
"""Value of the engine option ``logits_processors``: classes, and a name that vLLM is to import."""
