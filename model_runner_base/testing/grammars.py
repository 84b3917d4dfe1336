"""Grammars by brute force over the vocabulary: the tokens with which a structured output may go on."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import regex

from model_runner_base.testing.reference import Grammar
from model_runner_base.testing.tokenizer import EOS, token_texts


@cache
def _texts() -> list[str]:
    return token_texts()


def matches_regex(pattern: str) -> Grammar:
    """The grammar of texts that match the whole pattern."""
    compiled = regex.compile(pattern)

    @cache
    def allowed(text: str) -> np.ndarray:
        mask = np.array([t != "" and compiled.fullmatch(text + t, partial=True) is not None for t in _texts()])
        mask[EOS] = compiled.fullmatch(text) is not None
        return mask

    return lambda output: allowed("".join(_texts()[token] for token in output))


def is_one_of(choices: Sequence[str]) -> Grammar:
    """The grammar of exactly these texts."""

    def allowed(output: list[int]) -> np.ndarray:
        text = "".join(_texts()[token] for token in output)
        rests = [choice[len(text) :] for choice in choices if choice.startswith(text)]
        mask = np.array([t != "" and any(rest.startswith(t) for rest in rests) for t in _texts()])
        mask[EOS] = text in choices
        return mask

    return allowed
