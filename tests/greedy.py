"""Greedy tokens from an engine and from the reference, for the tests that compare the two."""

from vllm import LLM

from model_runner_base.testing import engine
from model_runner_base.testing.models import TinyModel

NEW_TOKENS = 20


def generate(llm: LLM, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> list[list[int]]:
    return engine.tokens_of(engine.generate(llm, prompts, engine.greedy(count)))


def expected(model: TinyModel, prompts: list[tuple[int, ...]], count: int = NEW_TOKENS) -> list[list[int]]:
    return [model.greedy(prompt, count) for prompt in prompts]
