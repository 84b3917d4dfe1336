"""Drives both runners through the same steps: compares what they make of them, and times them."""

import cProfile
import gc
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from benchmarks.fake_device import CLOCK_NS, VOCAB_SIZE
from benchmarks.host_cases import FEATURES, PROMPT_LENGTH, Case
from benchmarks.host_engine import LAYERS, MAX_NUM_TOKENS, Side, Sides, make_request
from model_runner_base.step.trace import RequestTrace

WARM_UP_STEPS = 20
SETTLING_STEPS = 8
"""Steps at the start of each turn that do not count: the processor's caches hold what the other runner left there."""
OUTLIER = 10
_SWEPT = np.zeros(64 << 20, np.uint8)
"""Array that is larger than a core's caches."""


class Lane:
    """One runner with a scheduler of its own."""

    def __init__(self, sides: Sides, side: Side, name: str, num_blocks: int, max_num_tokens: int) -> None:
        self.side = side
        self.scheduler = sides.make_scheduler(side, num_blocks, max_num_tokens)
        self.schedule_ns = self.update_ns = 0
        """Nanoseconds of the scheduler since they were last set to 0; the runner's are its side's."""
        self.profiler: cProfile.Profile | None = None
        """Profiler that runs while the scheduler or the runner does, from when it is set."""
        self.is_cold = False
        """Whether a step finds the processor's caches full of something else."""
        self._name = name
        self._num_requests = 0
        self._in_flight: deque[tuple[SchedulerOutput, Handed]] = deque()
        self._max_in_flight = 2 if sides.is_async else 1
        self._watching = ExitStack()
        self._watched: list[Any] | None = None
        """Traces of the live steps, while they are watched."""
        side.device.is_live = True

    def add(self, length: int, max_tokens: int, has_features: bool = False) -> None:
        """Adds a request with a prompt of its own."""
        number = self._num_requests
        self._num_requests += 1
        prompt = np.random.default_rng(number).integers(VOCAB_SIZE, size=length).tolist()
        params = {**FEATURES, "seed": number} if has_features else {}
        self.scheduler.add_request(make_request(f"{self._name}.{number}", prompt, max_tokens, **params))

    def step(self) -> "tuple[SchedulerOutput, Results | None]":
        """Launches a step, and reads the one before it, or this one if scheduling is synchronous."""
        if self.is_cold:
            _SWEPT[::64] += 1
        if self.profiler is not None:
            self.profiler.enable()
        start = time.thread_time_ns()
        scheduler_output = self.scheduler.schedule()
        self.schedule_ns += time.thread_time_ns() - start - CLOCK_NS
        self.side.launch(scheduler_output)
        output = self.side.read() if len(self._in_flight) + 1 == self._max_in_flight else None
        if self.profiler is not None:
            self.profiler.disable()
        is_told = self._watched is not None and scheduler_output.total_num_scheduled_tokens
        handed = self._watched.pop().requests if is_told else None  # type: ignore[union-attr]
        self._in_flight.append((scheduler_output, handed))
        return scheduler_output, None if output is None else self._finish(output)

    def drain(self) -> "list[Results]":
        """Reads what is in flight."""
        return [self._finish(self.side.read()) for _ in range(len(self._in_flight))]

    def _finish(self, output: ModelRunnerOutput) -> "Results":
        scheduler_output, handed = self._in_flight.popleft()
        if self.profiler is not None:
            self.profiler.enable()
        start = time.thread_time_ns()
        self.scheduler.update_from_output(scheduler_output, output)
        self.update_ns += time.thread_time_ns() - start - CLOCK_NS
        if self.profiler is not None:
            self.profiler.disable()
        return Results(scheduler_output, output, handed)

    def watch(self) -> None:
        """Records from now on what live steps hand over."""
        self._watched = self._watching.enter_context(self.side.watch(self.side.runner))

    def replay(self) -> None:
        """Stops recording; from now on the device replays its results."""
        self._stop_watching()
        self.side.device.replay()

    def close(self) -> None:
        """Ends all requests and lets the runner know; nothing is in flight."""
        self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)
        self.step()
        self.drain()
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._watching.close()
        self._watched = None


Handed = Mapping[str, RequestTrace] | None
"""Traces by request; None if the step was not watched."""


class Results(NamedTuple):
    """Results of a step of one lane."""

    scheduler_output: SchedulerOutput
    output: ModelRunnerOutput
    handed: Handed


class Race:
    """Two lanes, one a runner, that take the same steps. Live steps of both are compared."""

    _count = 0
    """Number of races in this process, so that no request id comes twice."""

    def __init__(self, sides: Sides, num_blocks: int | None = None, max_num_tokens: int = MAX_NUM_TOKENS) -> None:
        name, Race._count = str(Race._count), Race._count + 1
        self.lanes = [Lane(sides, side, name, num_blocks or sides.num_blocks, max_num_tokens) for side in sides]

    def add(self, length: int, max_tokens: int, has_features: bool = False) -> None:
        for lane in self.lanes:
            lane.add(length, max_tokens, has_features)

    def watch(self) -> None:
        for lane in self.lanes:
            lane.watch()

    def step(self) -> SchedulerOutput:
        (scheduled, stock), (ours_scheduled, ours) = (lane.step() for lane in self.lanes)
        assert scheduled.num_scheduled_tokens == ours_scheduled.num_scheduled_tokens
        if stock is not None and ours is not None:
            self._compare(stock, ours)
        return scheduled

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


def check_random(sides: Sides, has_features: bool, num_requests: int = 80) -> None:
    """Checks a crowded engine: prompts longer than a step's budget, and half the blocks that would be needed."""
    random = np.random.default_rng(0)
    race = Race(sides, num_blocks=250, max_num_tokens=200)
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
    assert num_steps > 300 and num_preempted and num_resumed and num_chunks > num_requests


# ---- Time ----


def measure(
    sides: Sides, case: Case, num_steps: int, turn: int, is_cold: bool, profiler: cProfile.Profile | None
) -> dict[str, float]:
    """Mean microseconds a step of both runners, which take turns of ``turn`` counted steps."""
    race = Race(sides)
    for index in range(case.num_decodes):
        # Contexts from 50 to 1500 in no order: blocks and attention tiles are entered at staggered times.
        race.add(50 + index * 997 % 1451, 4000, case.has_features)
    while race.step().total_num_scheduled_tokens != case.num_decodes or race.lanes[0].scheduler.waiting:
        pass
    race.watch()
    for _ in range(WARM_UP_STEPS):
        _add_prompts(race, case)
        race.step()
    if case.has_features:
        metadata = sides.stock.runner.input_batch.sampling_metadata
        assert not metadata.no_penalties and len(metadata.generators) == case.num_decodes
    sides.ours.runner.make_buffers(case.num_decodes, case.num_tokens - case.num_decodes)
    gc.collect()
    gc.disable()
    for lane in race.lanes:
        lane.replay()
        lane.is_cold = is_cold
        _run_timed(lane, case, WARM_UP_STEPS)
    race.lanes[1].profiler = profiler
    times: tuple[list[Times], list[Times]] = ([], [])
    for start in range(0, num_steps, turn):
        for lane, lane_times in zip(race.lanes, times, strict=True):
            if turn > 1:
                _run_timed(lane, case, SETTLING_STEPS)
            lane_times += _run_timed(lane, case, min(turn, num_steps - start))
    race.lanes[1].profiler = None
    gc.enable()
    race.close()
    return _summary(*times)


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


def _add_prompts(to: Race | Lane, case: Case) -> None:
    for _ in range(case.num_prefills):
        to.add(PROMPT_LENGTH, 1, case.has_features)


class Times(NamedTuple):
    """Nanoseconds of a step."""

    schedule: int
    runner: int
    update: int


def _run_timed(lane: Lane, case: Case, num_steps: int) -> list[Times]:
    times = []
    for _ in range(num_steps):
        _add_prompts(lane, case)
        lane.side.step_ns = lane.schedule_ns = lane.update_ns = 0
        scheduler_output, _ = lane.step()
        assert scheduler_output.total_num_scheduled_tokens == case.num_tokens
        times.append(Times(lane.schedule_ns, lane.side.step_ns, lane.update_ns))
    return times
