"""Sources of the checks' cases: prompts, sampling parameters, and hypothesis' settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from vllm import LLM, SamplingParams

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.engine import generate
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.reference import logits_after
from model_runner_base.testing.table import refusal

FIRST_TOKEN = 3
"""The first token id that is not special."""

DRAWN_CASES = settings(
    # The same cases on every machine and day, and no files left behind.
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=15,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def random_prompts(seed: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Prompts of ordinary tokens, one for each length."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(FIRST_TOKEN, VOCAB_SIZE, length).tolist()) for length in lengths]


def prompt_followed_by(model: Any, token: int) -> tuple[int, ...]:
    """A prompt whose greedy continuation begins with the token."""
    for seed in range(1000):
        (prompt,) = random_prompts(seed, [200])
        rows = logits_after(model, prompt)[4:]
        is_next = rows.argmax(axis=-1) == token
        if not PRECISION.is_exact:
            is_next &= model.are_certain(prompt)[4:]
        followed = np.flatnonzero(is_next)
        if len(followed):
            return prompt[: followed[0] + 5]
    raise LookupError(f"no short prompt is followed by token {token}")


@dataclass(frozen=True)
class Feature:
    """One sampling parameter, and how to draw it."""

    name: str
    values: st.SearchStrategy[dict[str, Any]]
    example: dict[str, Any]


def _feature(name: str, values: st.SearchStrategy[Any], example: Any) -> Feature:
    return Feature(name, values.map(lambda value: {name: value}), {name: example})


_tokens = st.integers(FIRST_TOKEN, VOCAB_SIZE - 1)
_penalties = st.sampled_from([-2.0, -0.5, 0.5, 1.0, 2.0])

FEATURES = [
    _feature("presence_penalty", _penalties, 1.0),
    _feature("frequency_penalty", _penalties, 1.0),
    _feature("repetition_penalty", st.sampled_from([0.5, 0.9, 1.1, 2.0]), 1.1),
    _feature("logit_bias", st.dictionaries(_tokens, st.sampled_from([-100.0, -3.0, 3.0, 5.0]), min_size=1), {5: 1.0}),
    _feature("allowed_token_ids", st.lists(_tokens, min_size=2, max_size=40, unique=True), [5, 6]),
    _feature("bad_words", st.lists(st.sampled_from(["a", "an", "the", "e ", "q", "ing th"]), min_size=1), ["a"]),
    _feature("min_tokens", st.integers(1, 12), 1),
    _feature("stop_token_ids", st.lists(_tokens, min_size=1, max_size=100), [5]),
    _feature("temperature", st.sampled_from([0.3, 0.7, 1.0, 1.8]), 1.0),
    _feature("top_k", st.sampled_from([1, 2, 5, 50, VOCAB_SIZE]), 5),
    _feature("top_p", st.sampled_from([0.05, 0.5, 0.9, 0.99]), 0.9),
    _feature("min_p", st.sampled_from([0.01, 0.1, 0.5, 1.0]), 0.1),
    _feature("seed", st.integers(0, 2**63 - 1), 1),
]


def supported_features(llm: LLM) -> list[Feature]:
    """Features that the device accepts. Refusals are not reported here: each feature has a check of its own."""
    supported = []
    for feature in FEATURES:
        try:
            generate(llm, [[5, 6, 7]], SamplingParams(max_tokens=1, **feature.example))
        except Exception as error:
            if refusal(error) is None:
                raise
        else:
            supported.append(feature)
    return supported


@st.composite
def sampling_params(draw: Callable[..., Any], features: Sequence[Feature]) -> SamplingParams:
    """Parameters that set some of the features; greedy unless a temperature is among them."""
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": draw(st.booleans())}
    for feature in draw(st.lists(st.sampled_from(list(features)), unique_by=lambda f: f.name, max_size=5)):
        options |= draw(feature.values)
    return SamplingParams(**options)
