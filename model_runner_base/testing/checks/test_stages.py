"""Two stages of a pipeline: each has half of the layers, and hands hidden states on; sampled tokens come home."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, require_small_blocks
from model_runner_base.testing.fixtures import Serve
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.processes import COUNT, ask, ask_all, count_compilations, kill, serving
from model_runner_base.testing.reference import Request, check_tokens
from model_runner_base.testing.server import gauge, wait_until_idle
from model_runner_base.vllm_compat.probes.config import stages_need_second_runner

PROMPTS = random_prompts(231, [100, 90, 110, 105, 9, 3])
"""Prompts of which four have several chunks; three of these do not fit into the cache at once."""
SHORT = PROMPTS[4:]
SHARED = [(*PROMPTS[0], *end) for end in random_prompts(232, [5, 2])]
"""Prompts that begin as another one does."""
KILLED = {True: "Worker_PP1", False: "Worker_PP0"}
"""Stage that is killed at the end, with asynchronous scheduling and without."""


@pytest.fixture(scope="module", params=[True, False], ids=["asynchronous", "synchronous"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def server(is_async: bool, serve: Serve, text_model: TinyModel, pytestconfig: pytest.Config) -> Iterator[str]:
    """A server whose cache holds 288 tokens, so that requests are preempted."""
    options: dict[str, Any] = {"async_scheduling": is_async, "pipeline_parallel_size": 2, "block_size": 16}
    # A stage has half of the layers.
    options |= {"max_num_batched_tokens": 32, "kv_cache_memory_bytes": cache_bytes(text_model.path, 288) // 2}
    with pytest.MonkeyPatch.context() as patch:
        if is_async and stages_need_second_runner():
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        with serving(serve, "stages", pytestconfig, **options) as url:
            yield url


def check(model: TinyModel, prompt: tuple[int, ...], tokens: list[int], what: str, **options: Any) -> None:
    """Checks each token of an answer against the reference, given those before it."""
    request = Request(prompt, SamplingParams(max_tokens=COUNT, **options))
    check_tokens(model, request, tokens, where=f"two stages, {what}")


def test_greedy_tokens(server: str, text_model: TinyModel) -> None:
    """Greedy tokens of two stages: alone, with chunks and preemptions, with prefixes that are in the cache."""
    what = "a request alone"
    check(text_model, SHORT[0], ask(server, SHORT[0], what, temperature=0), what, temperature=0)
    what, before = "requests at once", gauge(server, "vllm:num_preemptions_total")
    for _ in range(2):  # Prefixes of these are hit, too.
        for prompt, tokens in zip(PROMPTS, ask_all(server, PROMPTS, what, temperature=0), strict=True):
            check(text_model, prompt, tokens, what, temperature=0)
    wait_until_idle(server)
    if gauge(server, "vllm:num_preemptions_total") == before:
        require_small_blocks("no request is preempted")
        raise AssertionError("nothing was preempted")
    ask(server, PROMPTS[0], what, temperature=0)
    what, before = "a prefix in the cache", gauge(server, "vllm:prefix_cache_hits_total")
    for prompt in SHARED:
        check(text_model, prompt, ask(server, prompt, what, temperature=0), what, temperature=0)
    wait_until_idle(server)
    if gauge(server, "vllm:prefix_cache_hits_total") == before:
        require_small_blocks("no prefix is kept for others")
        raise AssertionError("the prefix cache was not hit")


def test_rules(server: str, text_model: TinyModel) -> None:
    """Rules that count tokens, and drawn tokens, of two stages."""
    for options in ({"temperature": 0, "presence_penalty": 1.5}, {"temperature": 1.0, "top_k": 2, "seed": 7}):
        what = "requests at once"
        for prompt, tokens in zip(PROMPTS, ask_all(server, PROMPTS, what, **options), strict=True):
            check(text_model, prompt, tokens, what, **options)


def test_nothing_is_compiled(server: str, tmp_path: Path) -> None:
    """No stage compiles anything once the server has started; all sizes of steps come."""
    warm = count_compilations(server, tmp_path)
    assert len(warm) == 2, f"{len(warm)} stages answered"
    for count in (1, 2, 4):
        ask_all(server, PROMPTS[-count:], "requests at once", temperature=0)
    assert count_compilations(server, tmp_path) == warm, "a stage has compiled something while it served"


def test_a_killed_stage(server: str, is_async: bool) -> None:
    """A stage that is killed ends all requests with an error, and the server with all of its processes."""
    kill(server, KILLED[is_async], SHORT)
