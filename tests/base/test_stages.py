"""Stages of a pipeline: two processes, each with half of the layers, have the tokens of one."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lane import HAS_OPENXLA
from scripts import results_of
from staged_engine import FAILING, SEED
from vllm import SamplingParams

from model_runner_base.admission.request_rules import check_session
from model_runner_base.errors import CheckpointError, RequestError
from model_runner_base.heads.pipeline_stages import FAILED, StageError, StageLink, StepCounter
from model_runner_base.step.request_failures import LastStageErrors, make_request_errors
from model_runner_base.step.request_states import RequestInfo
from model_runner_base.step.schedule import Arrival, Schedule
from model_runner_base.testing.models import TinyModel
from model_runner_base.worker import ModelRunnerWorker

ADAPTER: Any = object()
SCRIPT = Path(__file__).with_name("staged_engine.py")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # With the contract of vLLM's first model runner, releases later than 0.16 have no asynchronous stages.
    **({} if HAS_OPENXLA else {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
}


@pytest.fixture(scope="module")
def results(tiny_model: Callable[[str], TinyModel]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = results_of(SCRIPT, tiny_model("llama").path, 1, env=ENVIRONMENT)["RESULT"]
    return found


def test_tokens_of_stages_are_those_of_one_process(results: Mapping[str, Any]) -> None:
    """Greedy and drawn tokens, penalties and log probabilities, with chunks, preemptions, cached prefixes, and after a
    request was aborted in flight."""
    assert results["preempted"]
    for run in ("two", "cached", "later"):
        assert results[run] == results["one"], run


def test_batches_in_flight_repeat_in_turn(results: Mapping[str, Any]) -> None:
    """Stages repeat the same steps, and not few of them."""
    first, last = results["repeats"]
    assert first == last
    built, repeated = first
    assert repeated > 20 and repeated > built / 3


class Told(StageLink):
    """Link whose stage before sends these messages."""

    def __init__(self, *messages: torch.Tensor) -> None:
        super().__init__(1, [0, 1], None)
        self.step = 7
        self._messages = iter(messages)

    def begin_to_receive(self, stage: int, tag: int, tensor: torch.Tensor) -> Callable[[], None]:
        message = next(self._messages)

        def wait() -> None:
            tensor.copy_(message)

        return wait


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([torch.tensor([7, 4, 31]), torch.ones(4, 2)], None),
        # The same requests, each a token shorter.
        ([torch.tensor([7, 4, 28])], "stages 0 and 1 of the pipeline are at different steps: .* 28 and 31 in their"),
        ([torch.tensor([7, 8, 31])], "different steps: steps 7 and 7, 8 and 4 tokens"),
        ([torch.tensor([6, 4, 31])], "different steps: steps 6 and 7, 4 and 4 tokens"),
        ([torch.tensor([7, FAILED, 3]), torch.tensor([*b"why"])], "^why$"),
    ],
    ids=["its own", "a step late", "another size", "a step of the same size before", "a stage that failed"],
)
def test_a_stage_takes_the_hidden_states_of_its_own_step(messages: list[torch.Tensor], error: str | None) -> None:
    batch: Any = SimpleNamespace(seq_lens=np.array([9, 10, 12]))
    states = torch.zeros(4, 2)
    with pytest.raises(StageError, match=error) if error else nullcontext():
        Told(*messages).take(batch, states)
    assert bool(states.all()) == (error is None)


class Sends(StageLink):
    """Link of the first stage, which keeps its messages."""

    def __init__(self) -> None:
        super().__init__(0, [0, 1], None)
        self.messages: list[torch.Tensor] = []

    def send(self, stage: int, tag: int, tensor: torch.Tensor) -> None:
        self.messages.append(tensor)


def test_a_step_that_one_stage_leaves_out_is_found() -> None:
    """States of that step stay in line, and would be taken for those of the next one."""
    batch: Any = SimpleNamespace(seq_lens=np.array([9, 10, 12]))
    first, schedule = Sends(), Schedule((), (), [], [], [], {}, 0)
    StepCounter(first).begin_step(schedule)
    first.hand_on(batch, np.ones((4, 2), np.float32))
    last = Told(*first.messages)
    last.step = 0
    for _ in range(2):
        StepCounter(last).begin_step(schedule)
    with pytest.raises(StageError, match="different steps: steps 1 and 2"):
        last.take(batch, torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("stages", "transfer", "offloading", "is_raised"),
    [(1, None, None, False), (2, None, None, True), (1, object(), None, True), (1, None, 0.01, True)],
    ids=["one process", "the first stage", "a connector", "blocks on the host"],
)
def test_a_request_that_others_count_on_does_not_fail_alone(
    stages: int, transfer: Any, offloading: float | None, is_raised: bool
) -> None:
    """An error ends the engine on a stage that vLLM does not hear, or where a connector's scheduler counts blocks."""
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, tensor_parallel_size=1, world_size=stages, rank=0
        ),
        model_config=SimpleNamespace(runner_type="generate"),
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(kv_offloading_size=offloading),
    )
    errors = make_request_errors(config)
    with pytest.raises(IndexError) if is_raised else nullcontext(), errors.recording("bad", ()):
        raise IndexError("nothing at 13")
    assert ("bad" in errors) == (not is_raised)


def test_a_request_that_failed_runs_on_with_plain_rules() -> None:
    """Other stages run it, so the last one does, until the scheduler has read its error."""
    errors, admitted, arrival = LastStageErrors(), list[Arrival](), Arrival("bad", [5, 6, 7], 0, ([1],))
    known = RequestInfo(SamplingParams(seed=SEED), SEED, [5, 6], adapter=ADAPTER)

    def admit(each: Arrival) -> None:
        if each.params is None or each.params == known.params:
            raise IndexError(f"nothing at {SEED}")
        admitted.append(each)

    errors.admit_or_fail(arrival, known, admit)
    assert not errors and admitted == [replace(arrival, params=SamplingParams(temperature=0), adapter=ADAPTER)]
    assert errors.end_step(None) == {"errors": {"bad": f"IndexError: nothing at {SEED}"}}


def test_a_request_that_fails_on_the_last_stage_ends_alone(results: Mapping[str, Any]) -> None:
    """The others, which ran with it in the same steps, have their tokens."""
    failing, one = list(results["failing"]), list(results["one"])
    assert failing.pop(FAILING) == f"IndexError: nothing at {SEED}"
    one.pop(FAILING)
    assert failing == one


def test_sharded_state_is_not_saved() -> None:
    """Files have no names for stages, so each would overwrite those of the others."""
    worker: Any = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(CheckpointError, match="an engine with pipeline_parallel_size=1"):
        ModelRunnerWorker.save_sharded_state(worker, "/nowhere")


def test_a_session_is_refused() -> None:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    check_session(False, config)
    with pytest.raises(RequestError, match=r"sessions .* with pipeline stages yet: send whole prompts"):
        check_session(True, config)


def test_an_error_names_its_stage(results: Mapping[str, Any]) -> None:
    assert "stage 0 of the pipeline failed: ValueError: broken on purpose" in results["message"]
    assert results["seconds"] < 5
