"""Requests that are preempted in the step in which they were scheduled, which the priority policy does."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import engine
from scheduler_setting import BLOCK_SIZE, EOS, GrammarManager
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.harness.releases import new_request, one_cache
from model_runner_base.scheduling import RowScheduler
from model_runner_base.testing.checks.test_multimodal import COUNT, as_input, expected, prompts, read
from model_runner_base.testing.engine import greedy
from model_runner_base.testing.images import TOKEN_BYTES, SeeingModel, make_seeing_model

MAX_MODEL_LEN, ITEM_TOKENS = 256, 12


class Unwritten(Exception):
    """Raised where a request reads keys that no step has written, or an image that no step has encoded."""


class Device:
    """Memory of a device: for each place of the cache the tokens up to it, and the encoded items."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.places: dict[int, tuple[int, ...]] = {}
        self.items: set[str] = set()

    def run(self, step: SchedulerOutput) -> None:
        requests = {req_id: self.scheduler.requests[req_id] for req_id in step.num_scheduled_tokens}
        self.items -= set(step.free_encoder_mm_hashes)
        for req_id, input_ids in step.scheduled_encoder_inputs.items():
            for input_id in input_ids:
                self.items.add(requests[req_id].mm_features[input_id].identifier)
        assert len(self.items) * ITEM_TOKENS <= self.scheduler.encoder_cache_manager.cache_size
        tables = {req_id: self.scheduler.kv_cache_manager.get_block_ids(req_id)[0] for req_id in requests}
        read = []
        for req_id, request in requests.items():
            end, tokens, table = request.num_computed_tokens, tuple(request.all_token_ids), tables[req_id]
            start = end - step.num_scheduled_tokens[req_id]
            for position in range(end):
                place, prefix = (
                    table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE,
                    tokens[: position + 1],
                )
                if position >= start:
                    self.places[place] = prefix
                else:
                    read.append((place, prefix))
            for item in request.mm_features:
                first = item.mm_position.offset
                if first < end and first + ITEM_TOKENS > start and item.identifier not in self.items:
                    raise Unwritten(item.identifier)
        for place, prefix in read:  # A step writes all keys before it reads any.
            if self.places.get(place) != prefix:
                raise Unwritten(prefix)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_seeing_model("llava", tmp_path_factory.mktemp("seeing"))


def make_scheduler(cls: type[Scheduler], model: Path, num_blocks: int) -> Scheduler:
    config = EngineArgs(
        str(model),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=112,
        long_prefill_token_threshold=48,
        block_size=BLOCK_SIZE,  # type: ignore[arg-type]
        scheduling_policy="priority",
        async_scheduling=False,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    scheduler = cls(config, one_cache(["layer"], spec, num_blocks), GrammarManager(), BLOCK_SIZE)  # type: ignore
    scheduler.max_num_encoder_input_tokens = scheduler.encoder_cache_manager.cache_size = 4 * ITEM_TOKENS
    scheduler.encoder_cache_manager.reset()
    return scheduler


def add(scheduler: Scheduler, req_id: str, priority: int, prompt: list[int], images: dict[int, str]) -> None:
    """Adds a request whose ``images`` are given by the place where they begin."""
    items = []
    for offset, identifier in images.items():
        prompt[offset : offset + ITEM_TOKENS] = [41] * ITEM_TOKENS
        items.append(MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, ITEM_TOKENS)))
    params = SamplingParams(temperature=0, max_tokens=8 if len(prompt) > 40 else 30, ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    options: dict[str, Any] = {"priority": priority, "arrival_time": float(req_id), "mm_features": items}
    scheduler.add_request(new_request(req_id, prompt, params, EOS, block_hasher=hasher, **options))


def run(scheduler: Scheduler, num_steps: int, before_step: Callable[[int], None]) -> int:
    """Schedules steps on a device that checks them; returns the number of preemptions."""
    device, num_preempted = Device(scheduler), 0
    for number in range(num_steps):
        before_step(number)
        step = scheduler.schedule()
        num_preempted += len(step.preempted_req_ids or ())
        device.run(step)
        req_ids = list(step.num_scheduled_tokens)
        tokens = [[] if scheduler.requests[req_id].is_prefill_chunk else [9] for req_id in req_ids]
        index = {req_id: place for place, req_id in enumerate(req_ids)}
        scheduler.update_from_output(step, ModelRunnerOutput(req_ids, index, tokens))
    return num_preempted


@pytest.mark.parametrize(("has_image", "has_companion"), [(False, False), (True, False), (True, True)])
def test_a_prompt_gives_way_within_a_step(has_image: bool, has_companion: bool, model: SeeingModel) -> None:
    """Blocks and images of a part of a prompt that was taken out of a step count as not computed.

    In some cases the first prompt gets the last free blocks in a step in which an urgent request then finds none. A
    companion stays in that step, and reads the same image in it.
    """

    def read_unwritten(cls: type[Scheduler], num_blocks: int, num_urgent: int) -> bool:
        scheduler = make_scheduler(cls, model.path, num_blocks)

        def arrive(number: int) -> None:
            if number == 0:
                add(scheduler, "0", 9, list(range(40)) * 5, {100: "one", 165: "two"} if has_image else {})
            if number == 1:
                add(scheduler, "2", 1, [5] * num_urgent, {})
                if has_companion:
                    add(scheduler, "1", 1, [3] * 96, {50: "one", 65: "two"} if has_image else {})

        try:
            run(scheduler, 40, arrive)
        except Unwritten:
            return True
        return False

    cases = [(num_blocks, num_urgent) for num_blocks in range(14, 30) for num_urgent in (15, 16)]
    assert not any(read_unwritten(RowScheduler, *case) for case in cases)
    assert any(read_unwritten(Scheduler, *case) for case in cases), "vLLM's own does not fail here"


def test_nothing_is_read_that_no_step_computed(model: SeeingModel) -> None:
    """Keys and images that a request finds in the caches were computed by a step, whichever was preempted when."""
    num_preempted = 0
    for seed in range(8):
        draw, scheduler = random.Random(seed), make_scheduler(RowScheduler, model.path, 24)

        def arrive(number: int, draw: random.Random = draw, scheduler: Scheduler = scheduler) -> None:
            if draw.random() < 0.3:
                is_long = draw.random() < 0.4
                prompt = [draw.randrange(40) for _ in range(draw.randint(60, 200) if is_long else draw.randint(1, 20))]
                if draw.random() < 0.5:
                    prompt[:64] = range(min(64, len(prompt)))
                places = range(draw.randrange(20), len(prompt) - ITEM_TOKENS, draw.randint(20, 60))
                images = {place: f"image {draw.randrange(6)}" for place in places}
                add(scheduler, str(number), draw.randrange(3) + 3 * is_long, prompt, images)

        num_preempted += run(scheduler, 300, arrive)
    assert num_preempted > 100


@pytest.mark.parametrize(("start", "is_read"), [(47, False), (48, True), (49, True), (64, True), (65, False)])
def test_which_requests_read_an_item(start: int, is_read: bool, model: SeeingModel) -> None:
    """A request reads an item of one token if a step has this token; a drafter reads one token ahead."""
    scheduler: Any = make_scheduler(RowScheduler, model.path, 14)
    add(scheduler, "0", 0, list(range(40)) * 2, {})
    run(scheduler, 1, lambda _: None)
    request = scheduler.requests["0"]
    request.num_computed_tokens = 64
    request.mm_features = [MultiModalFeatureSpec(None, "image", "one", PlaceholderRange(start, 1))]
    step = SimpleNamespace(num_scheduled_tokens={"0": 16})
    assert list(scheduler._uses(step, "one")) == [("0", 0)] * is_read
    assert list(scheduler._uses(step, "other")) == []


def test_images_of_requests_with_priorities(model: SeeingModel) -> None:
    """Requests with images give way to more urgent ones at any point of their prompt, and get the right tokens."""
    asked = prompts(model)
    want = expected(model, asked)
    options = model.limits | {
        "kv_cache_memory_bytes": 288 * TOKEN_BYTES,
        "max_model_len": 256,
        "max_num_batched_tokens": 24,
    }
    with engine(
        model.path, skip_tokenizer_init=False, enforce_eager=True, scheduling_policy="priority", **options
    ) as llm:
        for turn in range(4):
            priorities = [(place * 5 + turn * 3) % 7 for place in range(len(asked))]
            inputs = [as_input(prompt) for prompt in asked]
            outputs = llm.generate(inputs, greedy(COUNT), priority=priorities, use_tqdm=False)
            assert read(outputs) == want
