"""Drives both runners through the same steps: compares what they make of them, and times them."""

import cProfile
import gc
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from benchmarks.fake_device import VOCAB_SIZE
from benchmarks.host_cases import FEATURES, PROMPT_LENGTH, Case
from benchmarks.host_engine import MAX_NUM_TOKENS, Side, Sides, make_request

WARM_UP_STEPS = 20
OUTLIER = 10
_SWEPT = np.zeros(64 << 20, np.uint8)
"""More than a core's caches hold."""


class Drive:
    """One scheduler and both runners behind it. Live steps are checked."""

    _num_requests = 0
    """Of this process: no id comes twice."""

    def __init__(self, sides: Sides, num_blocks: int | None = None, max_num_tokens: int = MAX_NUM_TOKENS) -> None:
        self.sides = sides
        self.scheduler = sides.make_scheduler(num_blocks or sides.num_blocks, max_num_tokens)
        self.profiler: cProfile.Profile | None = None
        """Of our side, from when it is set."""
        self.is_cold = False
        """Whether each side finds the processor's caches full of something else."""
        self._in_flight: deque[tuple[SchedulerOutput, list[dict[str, torch.Tensor]]]] = deque()
        self._max_in_flight = 2 if sides.is_async else 1
        self._order: list[Side] = list(sides)
        for side in sides:
            side.device.is_live = True

    def add(self, length: int, max_tokens: int, has_features: bool = False) -> None:
        """A request with a prompt of its own."""
        number = Drive._num_requests
        Drive._num_requests += 1
        prompt = np.random.default_rng(number).integers(VOCAB_SIZE, size=length).tolist()
        params = {**FEATURES, "seed": number} if has_features else {}
        self.scheduler.add_request(make_request(str(number), prompt, max_tokens, **params))

    def step(self) -> SchedulerOutput:
        """Launches a step; reads the one before it, or this one if scheduling is synchronous."""
        scheduler_output = self.scheduler.schedule()
        self._in_flight.append((scheduler_output, []))
        is_full = len(self._in_flight) == self._max_in_flight
        self._order.reverse()
        outputs = {}
        for side in self._order:
            if self.is_cold:
                _SWEPT[::64] += 1
            is_profiled = self.profiler is not None and side is self.sides.ours
            if is_profiled:
                self.profiler.enable()  # type: ignore[union-attr]
            side.launch(scheduler_output)
            if is_full:
                outputs[side] = side.read()
            if is_profiled:
                self.profiler.disable()  # type: ignore[union-attr]
        self._in_flight[-1][1].extend(side.runner.model.seen for side in self.sides)
        if is_full:
            self._finish_step(outputs)
        return scheduler_output

    def _finish_step(self, outputs: Mapping[Side, ModelRunnerOutput]) -> None:
        scheduler_output, seen = self._in_flight.popleft()
        stock, ours = (outputs[side] for side in self.sides)
        if self.sides.ours.device.is_live and scheduler_output.total_num_scheduled_tokens:
            compare(scheduler_output, (stock, ours), seen)
        self.scheduler.update_from_output(scheduler_output, stock)

    def close(self) -> None:
        """Ends all requests and lets the runners know."""
        while self._in_flight:
            self._finish_step({side: side.read() for side in self.sides})
        self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)
        self.step()
        while self._in_flight:
            self._finish_step({side: side.read() for side in self.sides})


# ---- Both do the same ----


class Handed(NamedTuple):
    """What a runner made of one request in one step."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    seq_len: int
    sampled_from: int
    sampled: list[int]
    attended: list[float]


def by_request(
    scheduler_output: SchedulerOutput, output: ModelRunnerOutput, seen: Mapping[str, torch.Tensor]
) -> dict[str, Handed]:
    """A runner has an order of its own; its output tells which."""
    arrays = {name: tensor.tolist() for name, tensor in seen.items()}
    handed, start = {}, 0
    for index, req_id in enumerate(output.req_ids):
        tokens = slice(start, start + scheduler_output.num_scheduled_tokens[req_id])
        handed[req_id] = Handed(
            token_ids=arrays["token_ids"][tokens],
            positions=arrays["positions"][tokens],
            slots=arrays["slots"][tokens],
            seq_len=arrays["seq_lens"][index],
            sampled_from=arrays["sampled_from"][index] - start,
            sampled=list(output.sampled_token_ids[index]),
            attended=arrays["attended"][tokens] if "attended" in arrays else [],
        )
        start = tokens.stop
    return handed


def compare(
    scheduler_output: SchedulerOutput, outputs: Sequence[ModelRunnerOutput], seen: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    stock, ours = (by_request(scheduler_output, *side) for side in zip(outputs, seen, strict=True))
    assert stock.keys() == ours.keys() == scheduler_output.num_scheduled_tokens.keys()
    for req_id, expected in stock.items():
        message = f"request {req_id}: {ours[req_id]}, but stock has {expected}"
        assert ours[req_id]._replace(attended=[]) == expected._replace(attended=[]), message
        # Sums of floats in another order.
        assert np.allclose(ours[req_id].attended, expected.attended, atol=1e-5), message
    logprobs = [output.logprobs for output in outputs]
    assert (logprobs[0] is None) == (logprobs[1] is None)
    if logprobs[0] is not None and logprobs[1] is not None:
        assert logprobs[0].logprobs.shape == logprobs[1].logprobs.shape


def check_random(sides: Sides, has_features: bool, num_requests: int = 80) -> None:
    """A crowded engine: prompts longer than a step's budget, and half the blocks that would be needed."""
    random = np.random.default_rng(0)
    drive = Drive(sides, num_blocks=250, max_num_tokens=200)
    for side in sides:
        side.device.attends = True
    lengths, counts = random.integers(1, 400, num_requests), random.integers(1, 120, num_requests)
    num_steps = num_preempted = num_resumed = num_chunks = 0
    waiting = list(zip(lengths.tolist(), counts.tolist(), strict=True))
    while waiting or drive.scheduler.has_unfinished_requests():
        while waiting and random.random() < 0.3:
            drive.add(*waiting.pop(), has_features=has_features)
        output = drive.step()
        num_steps += 1
        num_preempted += len(output.preempted_req_ids or ())
        num_resumed += len(output.scheduled_cached_reqs.resumed_req_ids)
        num_chunks += sum(1 < count < 200 for count in output.num_scheduled_tokens.values())
    drive.close()
    for side in sides:
        side.device.attends = False
    assert num_steps > 300 and num_preempted and num_resumed and num_chunks > num_requests


# ---- Time ----


def measure(
    sides: Sides, case: Case, num_steps: int, is_cold: bool, profiler: cProfile.Profile | None
) -> dict[str, float]:
    """Mean microseconds a step of both runners."""
    drive = Drive(sides)
    for index in range(case.num_decodes):
        # Contexts from 50 to 1500 in no order: blocks and attention tiles are entered at staggered times.
        drive.add(50 + index * 997 % 1451, 4000, case.has_features)
    while drive.step().total_num_scheduled_tokens != case.num_decodes or drive.scheduler.waiting:
        pass
    if case.has_features:
        metadata = sides.stock.runner.input_batch.sampling_metadata
        assert not metadata.no_penalties and len(metadata.generators) == case.num_decodes
    times: list[tuple[int, int]] = []
    gc.collect()
    gc.disable()
    for index in range(-2 * WARM_UP_STEPS, num_steps):
        if index == -WARM_UP_STEPS:
            for side in sides:
                side.device.replay()
            drive.is_cold = is_cold
        if index == 0:
            drive.profiler = profiler
        for _ in range(case.num_prefills):
            drive.add(PROMPT_LENGTH, 1, case.has_features)
        sides.stock.step_ns = sides.ours.step_ns = 0
        output = drive.step()
        if index >= 0:
            assert output.total_num_scheduled_tokens == case.num_tokens
            times.append((sides.stock.step_ns, sides.ours.step_ns))
    gc.enable()
    drive.profiler = None
    drive.close()
    middle = [median(side) for side in zip(*times, strict=True)]
    kept = [pair for pair in times if all(time < OUTLIER * mid for time, mid in zip(pair, middle, strict=True))]
    stock_us, ours_us = (fmean(side) / 1e3 for side in zip(*kept, strict=True))
    return {"stock_us": round(stock_us, 2), "ours_us": round(ours_us, 2), "ratio": round(stock_us / ours_us, 3)}
