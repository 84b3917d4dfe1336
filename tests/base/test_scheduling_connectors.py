"""Rows of our scheduler with a KV connector: steps and calls of the connector are those of vLLM's own scheduler."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from connected_pair import ConnectedPair
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from noting_connector import NotingConnector
from scheduler_pair import Habits, some_habits
from scheduler_setting import Asked, EagerRows, Setting, make
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

import model_runner_base.scheduling.rows.row_steps as row_steps
import model_runner_base.scheduling.rows.scheduled_rows as scheduled_rows
from model_runner_base.scheduling import RowScheduler, RowScheduling
from model_runner_base.scheduling.releases import DROPS_STALE_OUTPUTS
from model_runner_base.scheduling.rows.outputs import Batch
from model_runner_base.scheduling.rows.row_request import RowRequest
from model_runner_base.scheduling.rows.row_steps import RowSteps
from model_runner_base.scheduling.rows.scheduled_rows import ScheduledRows

ALL = ("loads", "delays", "writes")
QUIET = ("quiet", *ALL)
SETTINGS = st.builds(
    Setting,
    is_async=st.booleans(),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    log_stats=st.booleans(),
    num_blocks=st.sampled_from([60, 120, 400]),
    max_num_seqs=st.sampled_from([4, 24]),
    max_num_batched_tokens=st.sampled_from([24, 64, 200]),
    include_finished_set=st.booleans(),
    depth=st.sampled_from([2, 2, 3]),
    is_second_contract=st.sampled_from([False, DROPS_STALE_OUTPUTS]),
    connector=st.sampled_from([(), ("loads",), ("delays",), ("loads", "delays"), ALL, QUIET]),
    load_failures=st.sampled_from(["recompute", "fail"]),
)
HABITS = some_habits(sessions=st.sampled_from([0, 0.05, 0.4]))


@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(SETTINGS, HABITS, st.integers(0, 1 << 32), st.sampled_from([1.0, 0.2, 0.02]))
def test_lockstep(setting: Setting, habits: Habits, seed: int, look: float) -> None:
    ConnectedPair(setting, habits, seed).run(100, look)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("connector", [(), ALL, QUIET])
def test_most_of_what_runs_has_rows(is_async: bool, connector: tuple[str, ...]) -> None:
    """Requests mostly have rows, also those with loaded prefixes; else these tests would say little."""
    setting = Setting(is_async, num_blocks=45, connector=connector)
    pair = ConnectedPair(setting, Habits(0.5, sessions=0, forced_resets=0), seed=1).run(300, 0.1)
    assert not pair.has_failed and pair.num_rows > 0.4 * pair.num_scheduled > 800
    assert pair.num_preempted
    assert not connector or min(pair.counts.values()) > 5, pair.counts


def test_sessions() -> None:
    """A session's turns go on with loaded prefixes, without a failure of vLLM's own."""
    counts = Counter[str]()
    for seed in range(4):
        setting = Setting(is_async=seed % 2 == 0, num_blocks=(60, 300)[seed // 2], connector=ALL)
        pair = ConnectedPair(setting, Habits(sessions=0.4), seed).run(120, 0.2)
        assert not pair.has_failed, seed
        counts.update(pair.counts)
    assert min(counts[name] for name in pair.counts) > 5, counts


def test_rows_of_models_with_states() -> None:
    """Blocks of two groups are handed to a connector when a request ends."""
    setting = Setting(caching=False, num_blocks=45, has_states=True, connector=("delays",))
    pair = ConnectedPair(setting, Habits(0.5, sessions=0, forced_resets=0), seed=1).run(150, 0.1)
    assert pair.num_rows > 0.4 * pair.num_scheduled > 400


# ---- Deliberate faults ----


def _alone(self: RowSteps, step: Any) -> None:
    """Lets the rows join after the connector has seen the step."""
    if step.kv_connector_metadata is not None:
        _JOIN(self, step)


_JOIN = RowSteps._join_rows
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a connector sees a part of a step": (RowSteps, "_join_rows", _alone),
    "a step with rows alone is not shown": (row_steps, "show_to_connector", lambda scheduler, step: None),
    "vLLM counts the rows' tokens, too": (RowSteps, "_update_after_schedule", Scheduler._update_after_schedule),
    "blocks that were not loaded are not noticed": (row_steps, "failed_loads", lambda transfers: False),
    "a request that a connector writes misses a step": (scheduled_rows, "count_step", lambda *args: None),
    "a connector is not asked for figures and events": (row_steps, "is_asked_each_step", lambda connector: False),
    "readers find what was": (ScheduledRows, "bring_up_to_date", lambda self, request: None),
}
if DROPS_STALE_OUTPUTS:
    FAULTS["blocks that wait for a step stay taken"] = (row_steps, "count_read", lambda scheduler: None)
    FAULTS["steps have no numbers"] = (row_steps, "number_step", lambda scheduler, is_counted: 0)
else:
    FAULTS["loaded tokens are not reported"] = (Batch, "num_external", property(lambda self: [], lambda *args: None))


def run_seeds() -> None:
    for seed in range(12):
        connector = QUIET if seed % 4 == 3 else ALL
        setting = Setting(is_async=seed % 3 != 0, num_blocks=(50, 300)[seed % 2], connector=connector)
        ConnectedPair(setting, Habits(sessions=0, aborts=0.05, longest_output=150), seed).run(80)


def test_nothing_is_caught_without_a_fault() -> None:
    run_seeds()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault], raising=False)
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        run_seeds()


# ---- Who is scheduled so ----


class OwnMetadata(Scheduler):
    """A vendor's scheduler that adds to a connector's metadata, as newer releases allow."""

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
        return connector.build_connector_meta(scheduler_output)


class OwnMetadataBelow(RowScheduling, OwnMetadata):
    pass


def test_an_own_hook_of_metadata_is_not_passed_over() -> None:
    setting = Setting(False, connector=())
    assert make(RowScheduler, setting)._rows is not None
    assert make(OwnMetadataBelow, setting)._rows is None


def test_vllms_own_connectors_keep_vllms_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors of vLLM's read every request in each step, which costs more of a request that has a row."""
    monkeypatch.setattr(NotingConnector, "__module__", "vllm.distributed.connectors")
    assert make(RowScheduler, Setting(False, connector=()))._rows is None


def test_a_step_is_whole_if_its_metadata_is_made_by_others() -> None:
    """Rows join a step also if a connector's method is replaced after the start."""
    scheduler = make(EagerRows, replace(Setting(False), connector=()))
    for index in range(3):
        scheduler.add_request(Asked(str(index), [1, 2, index], {"max_tokens": 9, "ignore_eos": True}).make())
    for count in range(4):
        step = scheduler.schedule()
        scheduler.update_from_output(step, _nines(step))
        scheduler.connector.build_connector_meta = lambda step: step.total_num_scheduled_tokens
        if count == 1:
            scheduler.add_request(Asked("late", [1, 2, 3], {"max_tokens": 9, "ignore_eos": True}).make())
    assert type(scheduler.requests["0"]) is RowRequest and len(step.num_scheduled_tokens) == 4


def _nines(step: Any) -> ModelRunnerOutput:
    req_ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(req_ids, {req_id: at for at, req_id in enumerate(req_ids)}, [[9] for _ in req_ids])
