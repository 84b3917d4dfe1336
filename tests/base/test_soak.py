"""Soak of an engine with blocks on the host, and of one with sleep and new weights between its requests.

Tokens stay right, and memory does not grow. With --full it takes thousands of requests."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import engine
from counts import IS_FULL
from greedy import expected, generate
from test_reload import reload_weights
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, core_of, greedy, metric
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.weights import other_weights

pytestmark = pytest.mark.newest
COUNT, BATCH = 10_000 if IS_FULL else 400, 40
GROWTH = 64 << 20
"""Bytes that the process may grow by after the first tenth of the requests, for what its libraries keep."""
OPTIONS: dict[str, Any] = {"enforce_eager": True, "max_model_len": 192, "max_num_seqs": 16}
Prompts = list[tuple[int, ...]]


def batches(prompts: Prompts) -> Iterator[list[int]]:
    """Places of prompts, some of them several times; at the end the process must not have grown."""
    drawn, process, before = random.Random(3), psutil.Process(), 0
    for number in range(COUNT // BATCH):
        yield drawn.choices(range(len(prompts)), k=BATCH)
        if number == COUNT // BATCH // 10:
            before = process.memory_info().rss
    assert process.memory_info().rss - before < GROWTH


def free_blocks(llm: LLM) -> int:
    free: int = core_of(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free


def aborted(llm: LLM, prompt: tuple[int, ...], number: int) -> None:
    """Sends a request, and takes it back after a step or two."""
    req_id = f"gone-{number}"
    llm.llm_engine.add_request(req_id, {"prompt_token_ids": list(prompt)}, greedy(50))
    for _ in range(1 + number % 2):
        llm.llm_engine.step()
    llm.llm_engine.abort_request([req_id])


def test_blocks_on_the_host(tiny_model: Callable[[str], TinyModel]) -> None:
    """Prompts of three times the cache, whose beginnings are shared, and requests that are taken back."""
    model = tiny_model("llama")
    starts = random_prompts(36, [48, 64, 80])
    prompts = [start + end for start in starts for end in random_prompts(37, [5, 20, 33, 40, 17])]
    wanted = expected(model, prompts, 8)
    memory = cache_bytes(model.path, sum(map(len, prompts)) // 3)
    options = {"block_size": 16, "kv_cache_memory_bytes": memory, "kv_offloading_size": 0.002}
    with engine(model.path, **OPTIONS, **options) as llm:
        empty = free_blocks(llm)
        for number, places in enumerate(batches(prompts)):
            aborted(llm, prompts[places[0]], number)
            assert generate(llm, [prompts[place] for place in places], 8) == [wanted[place] for place in places]
        assert metric(llm, "vllm:external_prefix_cache_hits") > COUNT
        scheduler = core_of(llm).scheduler
        assert not scheduler.requests and not scheduler.running and free_blocks(llm) == empty


def test_sleep_and_new_weights(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Tokens of a batch are those of the last weights, after a sleep of either level."""
    old = tiny_model("llama")
    models, prompts = [old, other_weights(old, tmp_path / "new")], random_prompts(38, [5, 30, 70, 12, 100])
    wanted = [expected(model, prompts, 8) for model in models]
    assert wanted[0] != wanted[1]
    with engine(old.path, **OPTIONS, enable_sleep_mode=True) as llm:
        empty, now = free_blocks(llm), 0
        for number, places in enumerate(batches(prompts)):
            assert generate(llm, [prompts[place] for place in places], 8) == [wanted[now][place] for place in places]
            if number % 3 == 0:
                llm.sleep(level=1)
                llm.wake_up()
            elif number % 3 == 1:
                llm.sleep(level=2)
                llm.wake_up(tags=["weights"])
                reload_weights(llm, weights_path=str(models[now].path))
                llm.wake_up(tags=["kv_cache"])
            else:
                now = 1 - now
                reload_weights(llm, weights_path=str(models[now].path))
        assert free_blocks(llm) == empty
