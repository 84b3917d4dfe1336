"""Streaming-input sessions as the scheduler sees them; their tokens are in test_streaming_input.py."""

from typing import Any

import pytest
from scheduler_pair import Habits, Pair
from scheduler_setting import BLOCK_SIZE, Asked, AsyncTurns, EagerAsyncRows, Setting, make
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

PARAMS = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "stop_token_ids": [3]}
LONG = {**PARAMS, "max_tokens": 8}


def say(scheduler: Any, req_id: str, prompt: list[int], params: dict[str, Any] = PARAMS) -> None:
    scheduler.add_request(Asked(req_id, prompt, params, {"resumable": True}).make())


def read(scheduler: Any, output: Any, token: int = 9) -> dict[str, list[int]]:
    """Gives a scheduler a step's tokens, the same for all; returns what the front end gets of them."""
    req_ids = list(output.num_scheduled_tokens)
    of_id = {req_id: index for index, req_id in enumerate(req_ids)}
    outputs = scheduler.update_from_output(output, ModelRunnerOutput(req_ids, of_id, [[token] for _ in req_ids]))
    return {each.request_id: each.new_token_ids for client in outputs.values() for each in client.outputs}


@pytest.mark.parametrize("cls", [AsyncTurns, EagerAsyncRows])
@pytest.mark.parametrize("is_queued", [True, False])
def test_what_a_step_in_flight_yields_for_an_ended_turn_is_nobodys(cls: type[Scheduler], is_queued: bool) -> None:
    scheduler = make(cls, Setting())
    say(scheduler, "a", [1, 2, 4], LONG)
    if is_queued:
        say(scheduler, "a", [5, 6], LONG)
    read(scheduler, scheduler.schedule())
    ending, late = scheduler.schedule(), scheduler.schedule()
    assert read(scheduler, ending, token=3) == {"a": [3]}
    if not is_queued:
        assert scheduler.requests["a"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
        say(scheduler, "a", [5, 6], LONG)
    following = scheduler.schedule()
    (new,) = following.scheduled_new_reqs
    assert new.prompt_token_ids == [1, 2, 4, 9, 5, 6] and new.num_computed_tokens == 4
    assert read(scheduler, late) == {}
    assert read(scheduler, following) == {"a": [9]}
    for _ in range(6):
        assert read(scheduler, scheduler.schedule()) == {"a": [9]}
    assert scheduler.requests["a"].num_tokens == 13 and not scheduler.late_outputs


@pytest.mark.parametrize("cls", [AsyncTurns, EagerAsyncRows])
@pytest.mark.parametrize("is_queued", [True, False])
def test_a_turn_that_ends_while_preempted_goes_on(cls: type[Scheduler], is_queued: bool) -> None:
    """A session whose turn ends while it is preempted goes on. There are four blocks; the first request takes a
    third one for the token after its second block, which preempts the session."""
    scheduler = make(cls, Setting(num_blocks=5, caching=False))
    scheduler.add_request(Asked("first", [1] * (2 * BLOCK_SIZE - 1), {**PARAMS, "max_tokens": 4}).make())
    say(scheduler, "b", [2] * (2 * BLOCK_SIZE - 1))
    if is_queued:
        say(scheduler, "b", [5, 6])
    read(scheduler, scheduler.schedule())
    ending = scheduler.schedule()
    preempting = scheduler.schedule()
    assert preempting.preempted_req_ids == {"b"}
    assert read(scheduler, ending) == {"first": [9], "b": [9]}
    if not is_queued:
        say(scheduler, "b", [5, 6])
    assert [request.request_id for request in scheduler.waiting] == ["b"]
    read(scheduler, preempting)
    read(scheduler, scheduler.schedule())
    assert list(scheduler.requests) == ["b"]
    following = scheduler.schedule()
    (new,) = following.scheduled_new_reqs
    assert new.prompt_token_ids == [2] * (2 * BLOCK_SIZE - 1) + [9, 5, 6]
    assert following.num_scheduled_tokens == {"b": 2 * BLOCK_SIZE + 2}


def test_lockstep_of_sessions() -> None:
    """A session's turns end in all ways, and go on, without a failure of vLLM's own."""
    for seed in range(8):
        pair = Pair(Setting(is_async=seed % 2 == 0, num_blocks=(60, 300)[seed % 4 < 2]), Habits(sessions=0.4), seed)
        assert not pair.run(150, 0.2).has_failed
