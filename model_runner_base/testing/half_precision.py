"""Models in bfloat16 and float16: log probabilities and greedy tokens against HF transformers in the same dtype.

Sums of the same numbers in another order are rounded otherwise, so no two programs agree. The bar is what transformers
differs by from itself: in eager attention from SDPA, and in the dtype from float32. A device that rounds less often
than transformers does is nearer to float32. A rounding may change which experts a token gets, and with them all that
follows. So the differences of most tokens are compared, not of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from vllm import LLM

from model_runner_base.testing.engine import generate, greedy
from model_runner_base.testing.models import TinyModel, load_reference
from model_runner_base.testing.rules import log_softmax

DTYPES = ("bfloat16", "float16")
ORDERS = EAGER, SDPA = ("eager", "sdpa")
"""Names that transformers has for two orders of the sums in attention."""
NEW_TOKENS = 16
MOST = 0.75
"""Share of tokens whose differences are compared."""
SLACK = 1.2
"""Factor of the distance of transformers from float32, which another order may exceed by chance."""

Logprobs = list[np.ndarray]
"""Log probabilities [tokens, V] of prompts or of outputs, for each request."""


def distance(ours: Logprobs, theirs: Logprobs) -> float:
    """Root mean square of a token's differences, which those of most tokens do not exceed."""
    differences = np.concatenate(ours) - np.concatenate(theirs)
    return float(np.quantile(np.sqrt(np.square(differences).mean(axis=-1)), MOST))


@lru_cache(maxsize=4)
def _reference(model: TinyModel, dtype: str, order: str) -> Any:
    return load_reference(model.path, getattr(torch, dtype), order)


@dataclass
class Half:
    """Requests of one engine in ``dtype``, with greedy tokens."""

    model: TinyModel
    dtype: str
    prompts: Sequence[tuple[int, ...]]
    tokens: list[list[int]]
    """Output tokens of each request."""
    values: Logprobs
    """Log probabilities of each request's prompt, but for the first token, and of its output."""

    @classmethod
    def run(cls, llm: LLM, model: TinyModel, prompts: Sequence[tuple[int, ...]], dtype: str) -> "Half":
        """Runs the prompts in one batch; the engine needs ``max_logprobs=-1``."""
        tokens, values = [], []
        for output in generate(llm, prompts, greedy(NEW_TOKENS, logprobs=-1, prompt_logprobs=-1)):
            (completion,) = output.outputs
            entries: Any = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
            tokens.append(list(completion.token_ids))
            values.append(np.array([[entry[token].logprob for token in range(len(entry))] for entry in entries]))
        return cls(model, dtype, prompts, tokens, values)

    @torch.no_grad()
    def expected(self, dtype: str, order: str) -> Logprobs:
        """Transformers' log probabilities of the same tokens."""
        reference, rows = _reference(self.model, dtype, order), []
        for prompt, tokens in zip(self.prompts, self.tokens, strict=True):
            logits = reference(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, :-1]
            rows.append(log_softmax(logits.float().numpy()))
        return rows

    def check(self, orders: Sequence[str] = ORDERS) -> None:
        """Compares with transformers in the ``orders`` that it has for the model.

        Values must be about as near to those in float32 as transformers' own in the dtype are. A token must be the one
        that transformers prefers, if it does so by more than any of its own differences.
        """
        exact, *theirs = (
            self.expected(dtype, order) for dtype, order in [("float32", EAGER), *((self.dtype, o) for o in orders)]
        )
        for which, ours, of, *each in self._divided(self.values, exact, *theirs):
            error, bar = distance(ours, of), max(distance(one, of) for one in each)
            self._compare(which, error, SLACK * bar, "float32", "are at most, with some slack")
        pairs = combinations([exact, *theirs], 2)
        largest = max(float(np.abs(a - b).max()) for one, other in pairs for a, b in zip(one, other, strict=True))
        for prompt, tokens, rows in zip(self.prompts, self.tokens, theirs[-1], strict=True):
            for index, (token, row) in enumerate(zip(tokens, rows[len(prompt) - 1 :], strict=True)):
                margin = float(row.max() - row[token])
                assert margin <= largest, (
                    f"{self.dtype}, prompt of {len(prompt)} tokens: output {index} is {token}, and {row.argmax()} is "
                    f"likelier by {margin:.3f}, while transformers' own values differ by {largest:.3f} at most"
                )

    def check_orders(self) -> None:
        """Checks that values are as near to transformers' in one of two orders as these are to each other."""
        for which, ours, *theirs in self._divided(self.values, *(self.expected(self.dtype, order) for order in ORDERS)):
            error = min(distance(ours, each) for each in theirs)
            self._compare(which, error, distance(*theirs), "transformers'", "are from each other")

    def _divided(self, *values: Logprobs) -> list[tuple[Any, ...]]:
        """Values of prompts, and values of outputs: kernels of chunks differ from those of decode rows."""
        lengths = [len(prompt) - 1 for prompt in self.prompts]
        return [
            ("prompts", *([rows[:n] for rows, n in zip(each, lengths, strict=True)] for each in values)),
            ("outputs", *([rows[n:] for rows, n in zip(each, lengths, strict=True)] for each in values)),
        ]

    def _compare(self, which: str, error: float, bar: float, whom: str, how: str) -> None:
        """Raises AssertionError for an ``error`` that is NaN or more than ``bar``."""
        assert error <= bar, (
            f"{self.dtype}: log probabilities of {which} are {error:.4f} from {whom}, and transformers' {bar:.4f} {how}"
            f": does a kernel add up in {self.dtype}?"
        )


def even_out(weights: dict[str, torch.Tensor]) -> None:
    """Makes a tiny Llama attend to all tokens nearly alike, so that a sum is of many small numbers of one sign."""
    embeddings = weights["model.embed_tokens.weight"]
    embeddings += embeddings[:1].clone()
    for name, weight in weights.items():
        if "q_proj" in name:
            weight *= 0.1
