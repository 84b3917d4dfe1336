"""Encoder-decoder models: each token sees all of its request's sound, whatever is in the batch.

One engine serves all checks. Its KV cache holds three encoder outputs and little more, so requests are preempted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from vllm import LLM, RequestOutput

from model_runner_base.testing.engine import check_preempted, greedy, metric
from model_runner_base.testing.mismatch import check_same
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.sounds import sound
from model_runner_base.testing.transcription import BLOCK_SIZE, SCARCE_BYTES, START, Transcriber, make_transcriber

Prompt = tuple[np.ndarray, str]
PROMPTS: list[Prompt] = [
    (sound(1, 0.3), START),
    (sound(2, 1.5), START),
    (sound(3, 3.0), f"<|startoftranscript|><|prev|>and then he said: {START}"),
    (sound(4, 2.2), "<|startoftranscript|>"),
    (sound(5, 0.05), START),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transcriber:
    return make_transcriber(tmp_path_factory.mktemp("transcription"))


@pytest.fixture
def llm(engine: Callable[..., LLM], model: Transcriber) -> LLM:
    options: dict[str, Any] = {
        "max_model_len": 128,
        "skip_tokenizer_init": False,
        "max_num_batched_tokens": 128,
        "block_size": BLOCK_SIZE,
    }
    return engine(model.path, kv_cache_memory_bytes=SCARCE_BYTES, **options)


def check(llm: LLM, model: Transcriber, asked: Sequence[Prompt], counts: Sequence[int]) -> None:
    """Generates ``counts`` tokens, one number for each prompt, and compares them with the reference's."""
    params = [greedy(count, logprobs=0) for count in counts]
    compare(llm.generate([model.prompt(*each) for each in asked], params, use_tqdm=False), model, asked, counts)


def compare(
    outputs: Sequence[RequestOutput], model: Transcriber, asked: Sequence[Prompt], counts: Sequence[int]
) -> None:
    """Compares tokens and their log-probabilities with the reference's."""
    PRECISION.require_exact("tokens of sounds")
    for (heard, text), output, count in zip(asked, outputs, counts, strict=True):
        assert output.prompt_token_ids == model.tokens(text)
        (completion,) = output.outputs
        tokens, logprobs = model.greedy(heard, output.prompt_token_ids, count)
        name = f"prompt of {len(output.prompt_token_ids)} tokens, with its sound"
        check_same([completion.token_ids], [tokens], [name], [output.prompt_token_ids])
        assert completion.logprobs is not None
        got = []
        for token, place in zip(tokens, completion.logprobs, strict=True):
            assert place is not None
            got.append(place[token].logprob)
        np.testing.assert_allclose(got, logprobs, atol=1e-3)


def test_answers(llm: LLM, model: Transcriber) -> None:
    """More requests than rows, of sounds and prompts of several lengths: some arrive while others decode."""
    check(llm, model, PROMPTS, [12, 20, 5, 40, 9])


def test_preempted_requests(llm: LLM, model: Transcriber) -> None:
    """A preempted request, whose blocks went to others, has its sound encoded again."""
    before = metric(llm, "vllm:num_preemptions")
    check(llm, model, PROMPTS[:4], [50, 60, 40, 55])
    check_preempted(llm, before)


def test_a_prompt_longer_than_a_tile(llm: LLM, model: Transcriber) -> None:
    """A prompt longer than a tile of 64 queries is right, in one step with the tiles of another prompt."""
    told = (sound(6, 1.0), f"<|startoftranscript|><|prev|>{'told before ' * 9}{START}")
    assert len(model.tokens(told[1])) > 64
    check(llm, model, [told, PROMPTS[1]], [9, 9])
