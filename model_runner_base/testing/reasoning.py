"""A reasoning parser for the tiny models: reasoning ends with a token that the model generates by itself."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from vllm.reasoning import ReasoningParser, ReasoningParserManager

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.reference import Grammar

NAME = "model_runner_base_kit"


class TokenParser(ReasoningParser):
    """Parser of reasoning that any of some tokens ends."""

    ends: ClassVar[Collection[int]] = ()

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return any(token in self.ends for token in input_ids)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        return any(token in self.ends for token in delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids[first_end(input_ids, self.ends) :]

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Raises NotImplementedError, as the next method does: the checks ask for no chats."""
        raise NotImplementedError

    def extract_reasoning_streaming(self, *args: Any) -> None:
        raise NotImplementedError


ReasoningParserManager.register_module(NAME, module=TokenParser)


def first_end(tokens: Sequence[int], ends: Collection[int]) -> int:
    """Number of tokens up to the first that ends reasoning, that one included; all of them if there is none."""
    return next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))


def after_reasoning(grammar: Grammar, ends: Collection[int]) -> Callable[[list[int]], np.ndarray]:
    """The grammar of a text after reasoning, which is free."""

    def allowed(output: list[int]) -> np.ndarray:
        if not any(token in ends for token in output):
            return np.ones(VOCAB_SIZE, bool)
        return grammar(output[first_end(output, ends) :])

    return allowed
