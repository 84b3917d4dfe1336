"""Requests that end with an error while others, or they themselves, are in rows of the scheduler."""

from collections.abc import Collection
from typing import Any

from scheduler_setting import Asked, Setting, make
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from model_runner_base.heads.outputs import FailedOutput
from model_runner_base.scheduling import AsyncRowScheduler, RowScheduler


def request(name: str, num_tokens: int = 5, max_tokens: int = 100, **options: Any) -> Request:
    params = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return Asked(name, [21] * num_tokens, params, options).make()


def output_of(
    step: SchedulerOutput, missing: Collection[str] = (), errors: dict[str, str | None] | None = None
) -> ModelRunnerOutput:
    names = [name for name in step.num_scheduled_tokens if name not in missing]
    index = {name: place for place, name in enumerate(names)}
    tokens = [[20] for _ in names]
    if errors:
        return FailedOutput(names, index, tokens, errors=errors)
    return ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=tokens)


def test_a_request_that_failed_is_in_the_next_steps_rows() -> None:
    """A request that failed is in the rows of a step that was scheduled before its error was known."""
    scheduler = make(AsyncRowScheduler, Setting(log_stats=False))
    for name in "abcd":
        scheduler.add_request(request(name))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert len(scheduler._rows.requests) == 4
    ended = scheduler.update_from_output(first, output_of(first, "d", errors={"d": "nothing at 13"}))
    (told,) = (output for output in ended[0].outputs if output.request_id == "d")
    assert told.stop_reason == "nothing at 13"
    outputs = scheduler.update_from_output(second, output_of(second, "d"))[0].outputs
    assert sorted(output.request_id for output in outputs) == ["a", "b", "c"]
    assert "d" not in scheduler.requests and scheduler.schedule().num_scheduled_tokens.keys() == set("abc")


def test_an_error_is_told_while_rows_decode_steadily() -> None:
    scheduler = make(AsyncRowScheduler, Setting(log_stats=False))
    for name in "abcdef":
        scheduler.add_request(request(name))
    steps = [scheduler.schedule(), scheduler.schedule()]
    for _ in range(10):
        step = steps.pop(0)
        scheduler.update_from_output(step, output_of(step))
        steps.append(scheduler.schedule())
    scheduler.add_request(request("long", 300))
    outputs = scheduler.update_from_output(steps[0], output_of(steps[0]))[0].outputs
    assert "long" in [output.request_id for output in outputs]


def test_a_session_that_waits_keeps_its_blocks_while_others_run() -> None:
    """A further request waits for its turn, and not for the session's blocks."""
    scheduler = make(RowScheduler, Setting(is_async=False, caching=True, max_num_seqs=5))
    session = request("session", 40, 1, resumable=True)
    scheduler.add_request(session)
    for name in ("", *"abcde", "waits", "", ""):
        if name:
            scheduler.add_request(request(name))
        step = scheduler.schedule()
        scheduler.update_from_output(step, output_of(step))
    assert len(scheduler._rows.requests) == 5 and "waits" not in step.num_scheduled_tokens
    assert session.num_computed_tokens == 40
