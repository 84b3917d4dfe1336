"""Runs both runners through the same steps, compares what they make of them, and times them in turns."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.harness.report import steps_in_turns
from benchmarks.harness.runners import (
    LAYERS,
    MAX_NUM_TOKENS,
    NUM_BLOCKS,
    Lane,
    Results,
    Side,
    cache_config,
    layered_config,
    length_of,
    make_scheduler,
)
from benchmarks.host.cases import FEATURES, PROMPT_LENGTH, Case
from benchmarks.host.stock_runner import StockBackend, StockRunner, watch_stock
from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.scheduling import make_scheduler as make_row_scheduler
from model_runner_base.step.trace import RequestTrace

WARM_UP_STEPS = 20
OUTLIER = 10


class Maker(NamedTuple):
    """Parts of a lane that all races share: a runner with its config, and what makes its scheduler."""

    side: Side
    scheduler: Callable[..., Scheduler]
    config: VllmConfig


class Sides:
    """Sides of one of vLLM's runners and of ours, set up for one way of scheduling."""

    def __init__(self, is_async: bool, is_second: bool = False) -> None:
        """``is_second``: vLLM's second runner, not its first."""
        self.is_async = is_async
        runner_cls: type[Any] = StockRunner
        if is_second:
            from benchmarks.host.second_runner import SecondRunner, second_config

            runner_cls, stock_config = SecondRunner, second_config(is_async)
        else:
            stock_config = layered_config(is_async, StockBackend)
        with set_current_vllm_config(stock_config):
            runner = runner_cls(stock_config)
            runner.initialize_kv_cache(cache_config(NUM_BLOCKS))
        config = layered_config(is_async, PagedAttentionBackend)
        self.stock = Side(runner, runner.fake_device, watch_stock)
        self.ours = Side.ours(config)
        self.makers = (
            Maker(self.stock, AsyncScheduler if is_async else Scheduler, stock_config),
            Maker(self.ours, make_row_scheduler, config),
        )
        """Makers of both lanes: vLLM's own, and ours."""


class Race:
    """Two lanes, one a runner, that take the same steps. Live steps of both are compared."""

    _count = 0
    """Number of races in this process, so that no request id comes twice."""

    def __init__(self, sides: Sides, num_blocks: int = NUM_BLOCKS, max_num_tokens: int = MAX_NUM_TOKENS) -> None:
        name, Race._count = str(Race._count), Race._count + 1
        self.lanes = []
        for side, scheduler, config in sides.makers:
            side.device.is_live = True
            made = make_scheduler(scheduler, config, num_blocks, max_num_tokens)
            self.lanes.append(Lane(side, made, sides.is_async, name))

    def add(self, length: int, max_tokens: int, has_features: bool = False) -> None:
        for lane in self.lanes:
            add(lane, length, max_tokens, has_features)

    def watch(self) -> None:
        for lane in self.lanes:
            lane.watch()

    def step(self) -> SchedulerOutput:
        """Steps both lanes; returns what our scheduler asked for."""
        (scheduled, stock), (ours_scheduled, ours) = (lane.step() for lane in self.lanes)
        assert scheduled.num_scheduled_tokens == ours_scheduled.num_scheduled_tokens
        if stock is not None and ours is not None:
            self._compare(stock, ours)
        return ours_scheduled

    def close(self) -> None:
        for stock, ours in zip(*(lane.drain() for lane in self.lanes), strict=True):
            self._compare(stock, ours)
        for lane in self.lanes:
            lane.close()

    def _compare(self, stock: Results, ours: Results) -> None:
        if self.lanes[0].side.device.is_live and stock.scheduler_output.total_num_scheduled_tokens:
            compare(stock, ours)


# ---- Both do the same ----


def compare(stock: Results, ours: Results) -> None:
    req_ids = stock.scheduler_output.num_scheduled_tokens.keys()
    if stock.handed is not None and ours.handed is not None:
        assert stock.handed.keys() == ours.handed.keys() == req_ids
        for req_id, expected in stock.handed.items():
            for (what, mine), (_, others) in zip(_told(ours.handed[req_id]), _told(expected), strict=True):
                assert np.array_equal(mine, others), f"request {req_id}, {what}: {mine}, but stock has {others}"
    for req_id in req_ids:
        mine, others = (side.output.sampled_token_ids[side.output.req_id_to_index[req_id]] for side in (ours, stock))
        assert list(mine) == list(others), f"request {req_id} yields {mine}, but stock has {others}"
    logprobs = [results.output.logprobs for results in (stock, ours)]
    assert (logprobs[0] is None) == (logprobs[1] is None)
    if logprobs[0] is not None and logprobs[1] is not None:
        assert logprobs[0].logprobs.shape == logprobs[1].logprobs.shape


def _told(request: RequestTrace) -> Iterator[tuple[str, Any]]:
    """Values that can be compared, with their names: those of the first layer, and no row, as stock has none."""
    yield "token ids", request.token_ids
    yield "positions", request.positions
    yield "sampled token and its position", (request.sampled.token, request.sampled.position)
    yield "slots", request.slots[LAYERS[0]]
    for token, keys in enumerate(request.seen[LAYERS[0]]):
        yield f"keys that token {token} sees", keys.positions
        yield f"slots that token {token} sees", keys.slots


def check_random(sides: Sides, has_features: bool, num_requests: int) -> None:
    """Checks a crowded engine: prompts longer than a step's budget, and half the blocks that would be needed."""
    random = np.random.default_rng(0)
    race = Race(sides, num_blocks=10 + 3 * num_requests, max_num_tokens=200)
    race.watch()
    lengths, counts = random.integers(1, 400, num_requests), random.integers(1, 120, num_requests)
    num_steps = num_preempted = num_resumed = num_chunks = 0
    waiting = list(zip(lengths.tolist(), counts.tolist(), strict=True))
    while waiting or race.lanes[0].scheduler.has_unfinished_requests():
        while waiting and random.random() < 0.3:
            race.add(*waiting.pop(), has_features=has_features)
        output = race.step()
        num_steps += 1
        num_preempted += len(output.preempted_req_ids or ())
        num_resumed += len(output.scheduled_cached_reqs.resumed_req_ids)
        num_chunks += sum(1 < count < 200 for count in output.num_scheduled_tokens.values())
    race.close()
    assert num_steps > 3.75 * num_requests and num_preempted and num_resumed and num_chunks > num_requests


# ---- Time ----


def measure(sides: Sides, case: Case, num_steps: int, turn: int) -> dict[str, float]:
    """Mean microseconds a step of both runners, which take turns of ``turn`` counted steps."""
    race = Race(sides)
    for index in range(case.num_decodes):
        race.add(length_of(index), 4000, case.has_features)
    while race.step().total_num_scheduled_tokens != case.num_decodes or race.lanes[0].scheduler.waiting:
        pass
    race.watch()
    for _ in range(WARM_UP_STEPS):
        _add_prompts(race.lanes, case)
        race.step()
    if case.has_features:
        metadata = sides.stock.runner.input_batch.sampling_metadata
        assert not metadata.no_penalties and len(metadata.generators) == case.num_decodes
    sides.ours.runner.make_buffers(case.num_decodes, case.num_tokens - case.num_decodes)
    for lane in race.lanes:
        lane.replay()
        for _ in range(WARM_UP_STEPS):
            _timed_step(lane, case)
    steps = {f"{index}": partial(_timed_step, lane, case) for index, lane in enumerate(race.lanes)}
    times = steps_in_turns(steps, num_steps, turn)
    launched = _launched(race.lanes[0], case)
    race.close()
    return _summary(*times.values()) | launched


def _launched(lane: Lane, case: Case) -> dict[str, float]:
    """Launches of Triton kernels, and copies to the device, a step, of a runner that counts them."""
    if not hasattr(lane.side.runner, "launched"):
        return {}
    before = lane.side.runner.launched()
    for _ in range(WARM_UP_STEPS):
        _timed_step(lane, case)
    counts = zip(before.items(), lane.side.runner.launched().values(), strict=True)
    return {name: round((after - count) / WARM_UP_STEPS, 2) for (name, count), after in counts}


def _summary(stock: "list[Times]", ours: "list[Times]") -> dict[str, float]:
    middle = [median(map(sum, side)) for side in (stock, ours)]
    kept = [
        pair
        for pair in zip(stock, ours, strict=True)
        if all(sum(times) < OUTLIER * mid for times, mid in zip(pair, middle, strict=True))
    ]
    means = [[fmean(part) / 1e3 for part in zip(*side, strict=True)] for side in zip(*kept, strict=True)]
    values: dict[str, float] = {}
    for part, stock_us, ours_us in zip(Times._fields, *means, strict=True):
        values |= {f"stock_{part}_us": round(stock_us, 2), f"ours_{part}_us": round(ours_us, 2)}
    values["runner_ratio"] = round(values["stock_runner_us"] / values["ours_runner_us"], 3)
    values["sum_ratio"] = round(sum(means[0]) / sum(means[1]), 3)
    return values


def add(lane: Lane, length: int, max_tokens: int, has_features: bool) -> None:
    """Adds a request; one with features has a seed of its own."""
    lane.add(length, max_tokens, **(FEATURES | {"seed": lane.num_requests} if has_features else {}))


def _add_prompts(lanes: Iterable[Lane], case: Case) -> None:
    for lane in lanes:
        for _ in range(case.num_prefills):
            add(lane, PROMPT_LENGTH, 1, case.has_features)


class Times(NamedTuple):
    """Nanoseconds of a step."""

    schedule: int
    runner: int
    update: int


def _timed_step(lane: Lane, case: Case) -> Times:
    _add_prompts([lane], case)
    lane.side.step_ns = lane.schedule_ns = lane.update_ns = 0
    scheduler_output, _ = lane.step()
    assert scheduler_output.total_num_scheduled_tokens == case.num_tokens
    return Times(lane.schedule_ns, lane.side.step_ns, lane.update_ns)
