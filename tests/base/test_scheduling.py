"""Our scheduler in lockstep with vLLM's own: the same steps, the same outputs, the same state, whatever happens."""

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import BUNDLED_MODEL, engine
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_pair import Habits, Pair, some_habits
from scheduler_setting import BLOCK_SIZE, Asked, EagerAsyncRows, EagerRows, Setting, config_of, make
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import model_runner_base.scheduling.rows.row_steps as row_steps
import model_runner_base.scheduling.rows.scheduled_rows as scheduled_rows
from model_runner_base.scheduling import AsyncRowScheduler, RowScheduler, RowScheduling, make_scheduler
from model_runner_base.scheduling.releases import DROPS_STALE_OUTPUTS
from model_runner_base.scheduling.rows.request_arrays import MAX_STOPS
from model_runner_base.scheduling.rows.row_request import RowRequest
from model_runner_base.scheduling.rows.row_steps import RowSteps
from model_runner_base.scheduling.rows.scheduled_rows import ScheduledRows
from model_runner_base.scheduling.rows.support import unsupported_reason
from model_runner_base.scheduling.step_hooks import StepHooks

SETTINGS = st.builds(
    Setting,
    is_async=st.booleans(),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    log_stats=st.booleans(),
    num_blocks=st.sampled_from([60, 120, 400]),
    max_num_seqs=st.sampled_from([4, 24]),
    max_num_batched_tokens=st.sampled_from([24, 64, 200]),
    long_prefill_token_threshold=st.sampled_from([0, 0, 10]),
    include_finished_set=st.booleans(),
    depth=st.sampled_from([2, 2, 3]),
    is_second_contract=st.sampled_from([False, DROPS_STALE_OUTPUTS]),
    max_loras=st.sampled_from([0, 0, 1, 3]),
    windows=st.sampled_from([(), (), (40,), (17, 64), (1,)]),
)
HABITS = some_habits(
    logprobs=st.sampled_from([0, 0.3]),
    sessions=st.sampled_from([0, 0.1, 0.4]),
    shuffles=st.sampled_from([0, 0.2]),
    num_clients=st.sampled_from([1, 2]),
)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(SETTINGS, HABITS, st.integers(0, 1 << 32), st.sampled_from([1.0, 0.2, 0.02]))
def test_lockstep(setting: Setting, habits: Habits, seed: int, look: float) -> None:
    Pair(setting, habits, seed).run(100, look)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_most_of_what_runs_has_rows(is_async: bool, caching: bool) -> None:
    """Requests mostly have rows in a crowd that comes and goes, with preemption; else these tests would say little."""
    pair = Pair(Setting(is_async, caching, num_blocks=45), Habits(0.5, sessions=0), seed=1).run(300, 0.1)
    assert pair.num_rows > 0.5 * pair.num_scheduled > 1000
    assert pair.num_preempted


@pytest.mark.parametrize("is_async", [False, True])
def test_rows_of_models_with_states(is_async: bool) -> None:
    """A second group, of states, changes nothing: requests have rows, and each state that one holds."""
    setting = Setting(is_async, caching=False, num_blocks=45, has_states=True)
    pair = Pair(setting, Habits(0.5, sessions=0), seed=1).run(300, 0.1)
    assert pair.num_rows > 0.5 * pair.num_scheduled > 1000
    assert pair.num_preempted


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_rows_of_models_with_windows(is_async: bool, caching: bool) -> None:
    """Requests have rows, and give up the blocks that leave each window when vLLM's do."""
    setting = Setting(is_async, caching, num_blocks=150, windows=(40, 64))
    pair = Pair(setting, Habits(0.5, sessions=0, longest_output=150), seed=1).run(300, 0.1)
    assert pair.num_rows > 0.5 * pair.num_scheduled > 1000
    assert pair.num_preempted


@pytest.mark.parametrize("is_async", [False, True])
def test_rows_of_requests_with_adapters(is_async: bool) -> None:
    """Requests have rows while a step may have all adapters that are asked for."""
    pair = Pair(Setting(is_async, max_loras=4, num_blocks=45), Habits(0.5, sessions=0), seed=1).run(300, 0.1)
    assert pair.num_rows > 0.5 * pair.num_scheduled > 1000


def test_priorities_where_requests_need_blocks_in_several_groups() -> None:
    """An important request takes the blocks of one in a row, in the same step as vLLM's."""
    for num_blocks in range(12, 40):
        setting = Setting(
            False, False, "priority", num_blocks=num_blocks, max_num_seqs=8, max_num_batched_tokens=24, windows=(64, 64)
        )
        pair = Pair(setting, Habits(0, 0, 0, 0, 0, 0, sessions=0, drains=0, shuffles=0), seed=1)
        params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
        for number, (length, priority) in enumerate([(20, 2), (100, 0)]):
            options = {"priority": priority, "arrival_time": float(number)}
            pair._add(Asked(str(number), list(range(length)), params, options))
            pair.num_requests += 1
            for _ in range(2 + 10 * number):
                pair.step()


class RowsAlone(RowSteps, AsyncScheduler):
    least_rows = 1


def test_rows_need_no_corrections() -> None:
    pair = Pair(Setting(), Habits(sessions=0, forced_resets=0, structured=0), seed=4, ours=RowsAlone)
    assert pair.run(100, 0.2).num_rows > 300


def test_a_few_requests_are_left_to_vllm() -> None:
    pair = Pair(Setting(), Habits(arrivals=0), seed=0, ours=AsyncRowScheduler)
    for _ in range(AsyncRowScheduler.least_rows - 1):
        pair.arrive()
    pair.run(20)
    assert pair.num_scheduled and not pair.num_rows


# ---- Deliberate faults ----


def _skip_if(method: str, condition: Callable[..., bool]) -> Callable[..., Any]:
    """A method of ScheduledRows that does nothing where the condition holds."""
    whole = getattr(ScheduledRows, method)
    return lambda self, *args: None if condition(self, *args) else whole(self, *args)


def _without_stops(self: ScheduledRows, at: Any, tokens: np.ndarray) -> np.ndarray:
    whole, self._num_stops = self._num_stops, 0
    is_theirs = _IS_THEIRS(self, at, tokens)
    self._num_stops = whole
    return is_theirs


def _with_loose_rows(self: ScheduledRows, at: Any, tokens: np.ndarray) -> np.ndarray:
    whole, self.loose = self.loose, set()
    is_theirs = _IS_THEIRS(self, at, tokens)
    self.loose = whole
    return is_theirs


def _uncached(self: ScheduledRows, due: Any) -> list[int]:
    due.caching = due.caching[:0]
    return _GROW(self, due)


def _backwards(self: ScheduledRows, due: Any) -> list[int]:
    due.entering = due.entering[::-1]
    return _GROW(self, due)


def _misplaced(batch: Any, outputs: list[Any], their_places: list[int], theirs: Any) -> Any:
    for place in their_places:
        outputs.append(outputs[place])
    return _MERGE(batch, outputs, [], theirs)


def _freed_late(self: ScheduledRows, row: int) -> None:
    """Frees what has left the first window alone."""
    whole, self._windows = self._windows, self._windows[:1]
    _FREE_LEFT(self, row)
    self._windows = whole


def _freed_early(self: ScheduledRows, row: int) -> None:
    self.known[row] += 2
    self.computed[row] += 2
    _FREE_LEFT(self, row)
    self.known[row] -= 2
    self.computed[row] -= 2


def _unmoved(self: ScheduledRows, running: Any, before: Any, in_flight: Any) -> None:
    _UPDATE(self, running, before, [])


_IS_THEIRS, _GROW, _UPDATE = ScheduledRows._is_theirs, ScheduledRows.grow, ScheduledRows.update
_MERGE, _FREE_LEFT = row_steps.merge, ScheduledRows._free_left
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a stop token is not seen": (ScheduledRows, "_is_theirs", _without_stops),
    "an aborted request gets a token": (ScheduledRows, "_is_theirs", _with_loose_rows),
    "a request grows beyond its length": (ScheduledRows, "_ends", lambda self, rows, known: np.zeros(len(rows), bool)),
    "a step too many is scheduled": (ScheduledRows, "_is_at_end", lambda self, rows: np.zeros(len(rows), bool)),
    "full blocks are not cached": (ScheduledRows, "grow", _uncached),
    "blocks are given in another order": (ScheduledRows, "grow", _backwards),
    "blocks of a window are kept": (ScheduledRows, "_free_left", _freed_late),
    "blocks leave a window early": (ScheduledRows, "_free_left", _freed_early),
    "a full block is not hashed": (ScheduledRows, "_fill", _skip_if("_fill", lambda self, near: len(near) > 1)),
    "readers find what was": (ScheduledRows, "bring_up_to_date", lambda self, request: None),
    "rows move under a step": (ScheduledRows, "update", _unmoved),
    "an output loses its place": (row_steps, "merge", _misplaced),
    "grammars miss a token": (RowSteps, "_accept", lambda self, batch, token_lists, their_places: []),
    "adapters of requests in rows are not counted": (RowSteps, "_may_skip_adapters", lambda self, max_loras: False),
    "others are scheduled into the rows' share": (
        RowSteps,
        "_schedule_others",
        lambda self, num_rows, num_active: _SCHEDULE_OTHERS(self, num_rows, 0),
    ),
}
if DROPS_STALE_OUTPUTS:
    FAULTS["tokens in flight are not counted"] = (scheduled_rows, "num_in_flight", lambda request: 0)
    FAULTS["a rejected token ends no request"] = (row_steps, "DROPS_STALE_OUTPUTS", False)
    FAULTS["vLLM's code counts no rows"] = (StepHooks, "get_request_counts", Scheduler.get_request_counts)
_SCHEDULE_OTHERS = RowSteps._schedule_others


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        for seed in range(24):
            Pair(
                Setting(
                    is_async=seed % 4 != 0,
                    policy=("fcfs", "priority")[seed % 3 == 2],
                    num_blocks=(50, 300)[seed % 2] * (1 + seed % 3),
                    max_num_batched_tokens=(24, 48)[seed % 3 == 0],
                    long_prefill_token_threshold=(0, 10)[seed % 2],
                    max_loras=2,
                    windows=(40, 20)[: seed % 3],
                ),
                Habits(structured=0.1, forced_resets=0.01, aborts=0.05, longest_output=150),
                seed,
            ).run(120)


# ---- Requests in rows, as others see them ----


class Alone:
    """One of our schedulers, alone, and steps of it."""

    def __init__(self, is_async: bool = False, num_requests: int = 3) -> None:
        self.scheduler = make(EagerAsyncRows if is_async else EagerRows, Setting(is_async))
        self.requests = [
            Asked(str(index), [1, 2, index], {"temperature": 0, "max_tokens": 50, "ignore_eos": True}).make()
            for index in range(num_requests)
        ]
        for request in self.requests:
            self.scheduler.add_request(request)

    def step(self, token: int = 9) -> Any:
        output = self.scheduler.schedule()
        req_ids = list(output.num_scheduled_tokens)
        of_id = {req_id: index for index, req_id in enumerate(req_ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(req_ids, of_id, [[token] for _ in req_ids]))
        return output


def test_a_request_in_a_row_reads_as_it_is() -> None:
    alone = Alone()
    for count in range(1, 40):
        alone.step(count)
        request = alone.requests[0]
        assert request.num_tokens == 3 + count and request.num_output_tokens == count
        assert request.num_computed_tokens == 2 + count
        assert list(request.output_token_ids) == list(range(1, count + 1))
        assert len(request.block_hashes) == (3 + count) // BLOCK_SIZE
    assert type(request) is RowRequest


def test_writing_a_request_takes_it_out_of_its_row() -> None:
    alone = Alone()
    for _ in range(4):
        alone.step()
    first, second, third = alone.requests
    assert type(first) is type(second) is type(third) is RowRequest
    first.status = RequestStatus.RUNNING
    second.num_computed_tokens = second.num_computed_tokens
    assert type(first) is type(second) is Request and first.num_tokens == second.num_tokens == 7
    copied = copy.copy(third)
    assert type(copied) is type(third) is Request and copied.num_tokens == 7
    alone.step()
    assert type(first) is type(second) is type(third) is RowRequest and third.num_tokens == 8


def test_a_request_that_paused_gets_no_row() -> None:
    """A request that paused needs vLLM's own step, which hands out all of its tokens again."""
    alone = Alone()
    for _ in range(2):
        alone.step()
    request = alone.requests[0]
    request.status = RequestStatus.RUNNING
    rows = alone.scheduler._rows
    assert rows.can_take(request, {"0", "1"}) and not rows.can_take(request, {"1", "2"})


def test_nothing_of_a_row_stays_with_a_finished_request() -> None:
    alone = Alone()
    for _ in range(4):
        alone.step()
    alone.scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    request = alone.requests[1]
    assert type(request) is Request and "decode_rows" not in vars(request) and request.num_tokens == 7
    alone.step()
    assert request not in alone.scheduler._rows.requests


def test_repeated_steps_hand_out_the_same_objects() -> None:
    alone = Alone()
    for _ in range(3):
        alone.step()
    first, second = alone.step(), alone.step()
    assert first.num_scheduled_tokens is second.num_scheduled_tokens
    assert first.scheduled_cached_reqs.req_ids is second.scheduled_cached_reqs.req_ids
    assert first.scheduled_cached_reqs.new_block_ids is not second.scheduled_cached_reqs.new_block_ids


def test_an_output_that_is_no_plain_token_is_vllms_to_read() -> None:
    """A step has no token for some requests, which vLLM's runner never says of a decode."""
    Pair(Setting(), Habits(no_tokens=0.05, sessions=0, arrivals=0.1), 3).run(60)


@pytest.mark.parametrize("stops", [list(range(20, 20 + MAX_STOPS)), list(range(20, 19 + MAX_STOPS))])
def test_many_stop_tokens(stops: list[int]) -> None:
    pair = Pair(Setting(False), Habits(arrivals=0), 0)
    pair._add(Asked("0", [1, 2], {"temperature": 0, "max_tokens": 40, "stop_token_ids": stops}))
    pair.run(40)
    assert bool(pair.num_rows) == (len(stops) < MAX_STOPS)


# ---- Who is scheduled so ----


def test_make_scheduler_follows_the_configuration() -> None:
    assert type(make(make_scheduler, Setting(True))) is AsyncRowScheduler  # type: ignore[arg-type]
    assert type(make(make_scheduler, Setting(False))) is RowScheduler  # type: ignore[arg-type]


class OwnHook(Scheduler):
    """A vendor's scheduler, whose hook follows every request."""

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)


class OwnHookBelow(RowScheduling, OwnHook):
    pass


class OwnHookAbove(OwnHook, RowScheduler):
    pass


class SeesAll(RowScheduler):
    def schedule(self) -> Any:
        return super().schedule()


def test_a_method_of_the_users_is_not_passed_over() -> None:
    for cls, has_rows in ((OwnHookBelow, False), (OwnHookAbove, False), (SeesAll, True), (RowScheduler, True)):
        assert (make(cls, Setting(False))._rows is not None) == has_rows, cls


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ec_connector", SimpleNamespace()),
        ("enable_kv_cache_events", True),
        ("kv_metrics_collector", SimpleNamespace()),
        ("perf_metrics", SimpleNamespace()),
        ("num_lookahead_tokens", 1),
        ("is_encoder_decoder", True),
        ("use_pp", True),
        ("dcp_world_size", 2),
        *(() if DROPS_STALE_OUTPUTS else [("use_v2_model_runner", True)]),
        ("block_size", 2 * BLOCK_SIZE),
        ("kv_cache_manager", SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=()))),
    ],
)
def test_what_rows_do_not_know_is_vllms(name: str, value: Any) -> None:
    scheduler = make(RowScheduler, Setting(False))
    assert unsupported_reason(scheduler, RowSteps) is None
    setattr(scheduler, name, value)
    assert unsupported_reason(scheduler, RowSteps)


def test_the_platform_names_it_unless_the_user_names_one() -> None:
    for is_async in (False, True):
        config = config_of(Setting(is_async)).scheduler_config
        assert config.get_scheduler_cls() is make_scheduler and config.async_scheduling == is_async
    for named in (Scheduler, "vllm.v1.core.sched.scheduler.Scheduler"):
        args = EngineArgs(str(BUNDLED_MODEL), skip_tokenizer_init=True, scheduler_cls=named)
        assert args.create_engine_config().scheduler_config.get_scheduler_cls() is Scheduler


@pytest.mark.parametrize("named", [current_platform.scheduler_cls, "vllm.v1.core.sched.scheduler.Scheduler"])
def test_vllms_warning_is_of_the_users_classes_alone(named: str) -> None:
    log = logging.getLogger("vllm.config.scheduler")
    record = log.makeRecord(log.name, logging.WARNING, "", 0, "Using custom scheduler class %s.", (named,), None)
    assert bool(log.filter(record)) == (named != current_platform.scheduler_cls)


def test_an_engine_answers_as_with_vllms_scheduler() -> None:
    params = [
        SamplingParams(temperature=0.8, seed=index, max_tokens=5 + 7 * index, logprobs=index % 3 or None)
        for index in range(8)
    ]
    prompts = [{"prompt_token_ids": [index + 1] * (3 + 5 * index)} for index in range(8)]

    def answers(cls: str | None) -> list[Any]:
        """Answers of an engine, of which nothing is left when the next one starts."""
        with engine(BUNDLED_MODEL, scheduler_cls=cls, async_scheduling=True, enforce_eager=True) as llm:
            scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
            assert (getattr(scheduler, "_rows", None) is None) == (cls is not None)
            outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
            return [(each.outputs[0].token_ids, each.outputs[0].finish_reason) for each in outputs]

    assert answers("vllm.v1.core.sched.async_scheduler.AsyncScheduler") == answers(None)
