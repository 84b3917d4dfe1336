"""Encoder-decoder models: tokens and log probabilities are HF transformers', whatever a sound is batched with."""

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from vllm import LLM, RequestOutput

from model_runner_base.testing.checks.test_transcription import PROMPTS, check, compare
from model_runner_base.testing.engine import core_of, greedy, metric, runner_of
from model_runner_base.testing.transcription import SCARCE_BYTES, START, Transcriber, make_transcriber

COUNT = 12
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "enforce_eager": True, "max_num_batched_tokens": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transcriber:
    return make_transcriber(tmp_path_factory.mktemp("transcription"))


@pytest.fixture(scope="module")
def llm(model: Transcriber) -> Iterator[LLM]:
    with engine(model.path, **OPTIONS) as llm:
        yield llm


SOUNDS = [*PROMPTS, (PROMPTS[0][0], "<|startoftranscript|><|de|><|translate|><|notimestamps|>")]


def test_answers(llm: LLM, model: Transcriber) -> None:
    """Requests are more than rows and end at different times: some arrive while others decode."""
    counts = [12, 20, 5, 40, 9, 14]
    check(llm, model, SOUNDS, counts)
    check(llm, model, SOUNDS[::-1], counts)


def test_the_encoder_runs_once_a_request(llm: LLM, model: Transcriber, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder runs once a request. Its output stays in the request's own blocks, which are free again when all
    have ended."""
    seen: list[int] = []
    encode = runner_of(llm).model.embed_multimodal

    def noting(**kwargs: Any) -> Any:
        outputs = encode(**kwargs)
        seen.append(len(outputs))
        return outputs

    monkeypatch.setattr(runner_of(llm).model, "embed_multimodal", noting)
    free = core_of(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    before = free()
    check(llm, model, SOUNDS[:3], [COUNT] * 3)
    assert sum(seen) == 3
    assert free() == before


def test_aborted_requests(llm: LLM, model: Transcriber) -> None:
    """One request is aborted before its sound is encoded, one after its third token; the others do not notice."""
    engine_of = llm.llm_engine
    for name, (heard, text) in zip("abcd", SOUNDS, strict=False):
        engine_of.add_request(name, model.prompt(heard, text), greedy(COUNT, logprobs=0))
    engine_of.abort_request(["b"])
    outputs: dict[str, RequestOutput] = {}
    for step in range(100):
        if not engine_of.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in engine_of.step()}
        if step == 3:
            engine_of.abort_request(["c"])
    compare([outputs["a"], outputs["d"]], model, [SOUNDS[0], SOUNDS[3]], [COUNT] * 2)
    check(llm, model, SOUNDS[1:3], [COUNT] * 2)


def test_sound_is_needed(llm: LLM, model: Transcriber) -> None:
    with pytest.raises(ValueError, match="nothing to hear"):
        llm.generate(START, greedy(2), use_tqdm=False)


def test_preempted_requests_are_encoded_again(model: Transcriber) -> None:
    """A preempted request is encoded again without asynchronous scheduling; the kit has the case with it."""
    options = OPTIONS | {"kv_cache_memory_bytes": SCARCE_BYTES, "async_scheduling": False}
    with engine(model.path, **options) as llm:
        check(llm, model, SOUNDS[:4], [50, 60, 40, 55])
        assert metric(llm, "vllm:num_preemptions")


def test_few_prompts_arrive_in_a_step(llm: LLM) -> None:
    """A step takes as many new prompts as the encoder's budget has sounds for, here one; memory counts no more."""
    limits = runner_of(llm).step_limits()
    assert (limits.max_num_reqs, limits.max_chunks) == (4, 1)
    mixed = limits.named(limits.largest_sizes[1])
    assert mixed["chunk_tokens"] == 128 and mixed["chunk_tiles"] == 128 // limits.chunk.query + 1
