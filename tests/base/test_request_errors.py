"""A request that cannot be served ends alone, with words; the others get their tokens."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import engine
from failing import SEED, fail_admission
from greedy import expected, generate
from lane import HAS_OPENXLA
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from model_runner_base.heads.outputs import FailedOutput
from model_runner_base.step.call import Forward
from model_runner_base.step.components import StepComponent
from model_runner_base.step.schedule import Schedule
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of, greedy, runner_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.tokenizer import EOS, add_tokenizer

PROMPTS = random_prompts(70, [5, 30, 12])
LONGEST = 129 if HAS_OPENXLA else 128
"""Tokens of the longest request: four blocks of 32, and one that is never computed. Newer releases of vLLM hold
``max_model_len`` to what the cache has when they start."""


DIGITS = StructuredOutputsParams(regex="[0-9]{3}")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return add_tokenizer(tiny_model("llama"))


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def llm(request: pytest.FixtureRequest, model: TinyModel) -> Iterator[LLM]:
    options = {"async_scheduling": request.param, "skip_tokenizer_init": False, "num_gpu_blocks_override": 5}
    options |= {"disable_log_stats": True}  # With statistics requests are in no rows of the scheduler at once.
    with engine(
        model.path, max_model_len=256 if HAS_OPENXLA else LONGEST, max_num_seqs=5, enforce_eager=True, **options
    ) as llm:
        yield llm


def add(llm: LLM, name: str, prompt: tuple[int, ...], params: SamplingParams) -> None:
    llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)


def run(llm: LLM) -> dict[str, Any]:
    """The last completion of each request."""
    done, core = {}, llm.llm_engine
    deadline = time.monotonic() + 60  # Steps may find nothing to do while a grammar is compiled.
    while core.has_unfinished_requests() and time.monotonic() < deadline:
        for output in core.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
    assert not core.has_unfinished_requests(), "a request waits for ever"
    assert not core_of(llm).scheduler.requests
    return done


def check_beside(llm: LLM, model: TinyModel, params: SamplingParams, prompt: tuple[int, ...] = (5, 6)) -> Any:
    """Runs a request together with honest ones; returns what came of it."""
    for index, honest in enumerate(PROMPTS):
        add(llm, f"honest-{index}", honest, greedy(20))
    add(llm, "bad", prompt, params)
    done = run(llm)
    assert [list(done[f"honest-{index}"].token_ids) for index in range(3)] == expected(model, list(PROMPTS))
    return done["bad"]


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [2**63]},
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"temperature": float("inf")},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": 1e-38},
        {"max_tokens": 2**63},
        {"prompt_logprobs": 1, "skip_reading_prefix_cache": False},
    ],
    ids=repr,
)
def test_refused_before_it_is_queued(llm: LLM, model: TinyModel, params: dict[str, Any]) -> None:
    add(llm, "honest", PROMPTS[0], greedy(20))
    with pytest.raises((ValueError, VLLMValidationError)):
        add(llm, "bad", (5, 6), SamplingParams(**params))
    assert list(run(llm)["honest"].token_ids) == expected(model, [PROMPTS[0]])[0]


def test_as_many_tokens_as_there_may_be(llm: LLM, model: TinyModel) -> None:
    """An output whose ``max_tokens`` exceeds all that a column holds ends with the cache, at 4 blocks of 32 tokens."""
    for count in (2**31, 2**62, 2**63 - 1):
        output = check_beside(llm, model, greedy(count))
        assert output.finish_reason == "length" and len(output.token_ids) == LONGEST - 2


@pytest.mark.parametrize("length", [LONGEST - 2, LONGEST - 1, LONGEST, 200])
def test_a_prompt_that_never_fits(llm: LLM, model: TinyModel, length: int) -> None:
    """A prompt is served just below the limit, and refused at it and above."""
    (prompt,) = random_prompts(71, [length])
    if length < LONGEST:
        tokens = list(check_beside(llm, model, greedy(20), prompt).token_ids)
        assert tokens == model.greedy(prompt, LONGEST - length)
        return
    message = f"a prompt of {length} tokens does not fit .* 4 blocks hold 128 tokens" if HAS_OPENXLA else str(length)
    with pytest.raises((ValueError, VLLMValidationError), match=message):
        add(llm, "bad", prompt, greedy(20))
    assert generate(llm, [PROMPTS[0]]) == expected(model, [PROMPTS[0]])


@pytest.mark.parametrize("min_tokens", [1, 2, 3, 20])
def test_the_longest_length_goes_before_min_tokens(llm: LLM, model: TinyModel, min_tokens: int) -> None:
    """An output ends after the two tokens that are left, whatever ``min_tokens`` says."""
    (prompt,) = random_prompts(71, [LONGEST - 2])
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=min_tokens, ignore_eos=True)
    output = check_beside(llm, model, params, prompt)
    assert output.finish_reason == "length" and list(output.token_ids) == model.greedy(prompt, 2)


@pytest.mark.openxla
def test_what_the_front_end_lets_through_ends_in_the_engine(
    llm: LLM, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front end may not know what a cache holds, because of windows, or of a length that was fitted in another
    process. The engine then ends the request."""
    monkeypatch.setattr("model_runner_base.admission.request_errors.check_fits", lambda *_: None)
    output = check_beside(llm, model, greedy(20), random_prompts(71, [200])[0])
    assert output.finish_reason == "error" and "do not fit the 129 tokens" in output.stop_reason


def test_a_scheduler_that_reads_no_errors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that reads no errors is named, since its request would wait for ever."""
    monkeypatch.setattr(FailedOutput, "unread_by", "acme.Scheduler")
    with pytest.raises(RuntimeError, match=r"acme\.Scheduler cannot end single requests.*'request-1'"):
        FailedOutput([], {}, errors={"request-1": None})


def test_rules_that_meet_at_run_time(llm: LLM, model: TinyModel) -> None:
    """A grammar of digits, of which none is allowed, ends its request."""
    tokenizer = llm.get_tokenizer()
    other = next(token for token in range(20, 60) if not any(map(str.isdigit, tokenizer.decode([token]))))
    params = SamplingParams(
        temperature=0,
        max_tokens=5,
        allowed_token_ids=[other],
        structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"),
    )
    output = check_beside(llm, model, params)
    assert output.finish_reason == "error"
    assert "no token is left that structured_outputs, allowed_token_ids allow after 0" in output.stop_reason


def test_eos_ends_a_finished_grammar_before_min_tokens_do(llm: LLM, model: TinyModel) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=30, min_tokens=20, structured_outputs=StructuredOutputsParams(choice=["7"])
    )
    output = check_beside(llm, model, params)
    assert output.finish_reason == "stop" and output.text == "7"


def test_data_that_a_step_fails_on(llm: LLM, model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of any kind while a request takes its row ends that request alone; under asynchronous scheduling,
    steps in flight name it."""
    fail_admission(llm, monkeypatch)
    for grammar in (None, StructuredOutputsParams(choice=["7"])):
        params = greedy(9, seed=SEED)
        params.structured_outputs = grammar
        if grammar is not None:
            add(llm, "digits", (7, 8), SamplingParams(temperature=0, max_tokens=9, structured_outputs=DIGITS))
        output = check_beside(llm, model, params)
        assert output.finish_reason == "error" and f"IndexError: nothing at {SEED}" in output.stop_reason
    add(llm, "bad", (5, 6), greedy(9, seed=SEED))
    assert run(llm)["bad"].finish_reason == "error", "a step of nothing else"
    assert generate(llm, list(PROMPTS)) == expected(model, list(PROMPTS))
    assert not runner_of(llm).errors


def test_a_request_that_fails_leaves_no_prefix(llm: LLM, model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a request that the runner left out hold no keys: the same prompt does not find them in the cache."""
    (prompt,) = random_prompts(72, [100])
    fail_admission(llm, monkeypatch)
    add(llm, "bad", prompt, greedy(9, seed=SEED))
    assert run(llm)["bad"].finish_reason == "error"
    assert generate(llm, [prompt]) == expected(model, [prompt])
    assert not runner_of(llm).errors


def flush(llm: LLM) -> None:
    """Runs the steps, without tokens, that tell the runner which requests have ended."""
    for _ in range(3):
        llm.llm_engine.step()


class Reporter(StepComponent):
    """Component that reports a field of the output in every step."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.fields: dict[str, Any] = {"num_nans_in_logits": {"a request that is not there": 7}}

    def begin_step(self, schedule: Schedule) -> None:
        self.begun.append(schedule.total_num_tokens)

    def end_step(self, forward: Forward | None) -> dict[str, Any]:
        self.ended.append(0 if forward is None else forward.schedule.total_num_tokens)
        return self.fields


def test_components_report_in_every_step(llm: LLM, model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs have what a component reports, with errors and without tokens alike.

    The only request of some steps has failed.
    """
    reporter, scheduler, seen = Reporter(), core_of(llm).scheduler, list[Any]()
    read = scheduler.update_from_output
    fail_admission(llm, monkeypatch)
    flush(llm)
    monkeypatch.setattr(scheduler, "update_from_output", lambda step, output: seen.append(output) or read(step, output))
    runner_of(llm).parts.components.add(reporter)
    failed = greedy(9, seed=SEED)
    assert check_beside(llm, model, failed).finish_reason == "error"
    add(llm, "alone", (5, 6), failed)
    assert run(llm)["alone"].finish_reason == "error"
    flush(llm)
    fields, reporter.fields = reporter.fields, {}
    assert reporter.begun == reporter.ended
    assert 0 in reporter.begun and max(reporter.begun) == sum(map(len, PROMPTS))
    assert len(seen) == len(reporter.begun)
    assert [output.num_nans_in_logits for output in seen] == [fields["num_nans_in_logits"]] * len(seen)
    assert len([output for output in seen if getattr(output, "errors", None)]) == 2
