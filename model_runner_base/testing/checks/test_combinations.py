"""Sampling parameters in any combination, among any others; hypothesis draws them and shrinks what fails."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from vllm import LLM

from model_runner_base.testing.cases import DRAWN_CASES, random_prompts, sampling_params, supported_features
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request


def test_combinations(text_engine: Callable[..., LLM], text_model: TinyModel) -> None:
    """Random combinations of the parameters that the device supports, in batches of up to six requests."""
    llm = text_engine()
    features = supported_features(llm)
    lengths = st.sampled_from([1, 5, 31, 32, 33, 70, 130])

    @DRAWN_CASES
    @given(requests=st.lists(st.tuples(lengths, sampling_params(features)), min_size=1, max_size=6))
    def check(requests: list) -> None:
        prompts = random_prompts(50, [length for length, _ in requests])
        batch = [Request(prompt, params) for prompt, (_, params) in zip(prompts, requests, strict=True)]
        check_completions(llm, text_model, batch)

    check()
