"""Two replicas of an engine behind one server, which must have the same tokens, and must not wait for each other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, require_small_blocks
from model_runner_base.testing.fixtures import Serve
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.processes import COUNT, ask, ask_all, count_compilations, serving
from model_runner_base.testing.reference import Request, check_tokens
from model_runner_base.testing.server import gauge, wait_until_idle

PROMPTS = random_prompts(233, [100, 90, 110, 105, 9, 3])
"""Prompts of which four have several chunks; three of these do not fit into the cache at once."""
SHORT = PROMPTS[4:]
SHARED = [(*PROMPTS[0], *end) for end in random_prompts(234, [5, 2])]
"""Prompts that begin as another one does."""


@pytest.fixture(scope="module")
def server(serve: Serve, text_model: TinyModel, pytestconfig: pytest.Config) -> Iterator[str]:
    """A server whose replicas hold 288 tokens each, so that requests are preempted."""
    options = {"max_num_batched_tokens": 32, "block_size": 16, "api_server_count": 1}
    memory = cache_bytes(text_model.path, 288)
    with serving(serve, "replicas", pytestconfig, data_parallel_size=2, kv_cache_memory_bytes=memory, **options) as url:
        yield url


def check(model: TinyModel, prompt: tuple[int, ...], tokens: list[int], what: str) -> None:
    """Checks each greedy token of an answer against the reference, given those before it."""
    check_tokens(model, Request(prompt, SamplingParams(max_tokens=COUNT, temperature=0)), tokens, where=what)


@pytest.mark.parametrize("replica", [0, 1])
def test_greedy_tokens(replica: int, server: str, text_model: TinyModel) -> None:
    """Greedy tokens of a replica while the other is idle: alone, with chunks and preemptions, with cached prefixes."""

    def figure(name: str) -> float:
        return gauge(server, f"vllm:{name}_total", engine=replica)

    what, made = f"replica {replica} alone", figure("generation_tokens")
    check(text_model, SHORT[0], ask(server, SHORT[0], what, replica=replica, temperature=0), what)
    before = figure("num_preemptions")
    for _ in range(2):
        for prompt, tokens in zip(PROMPTS, ask_all(server, PROMPTS, what, replica=replica, temperature=0), strict=True):
            check(text_model, prompt, tokens, f"{what}, requests at once")
    ask(server, PROMPTS[0], what, replica=replica, temperature=0)
    wait_until_idle(server)
    is_preempted, before = figure("num_preemptions") > before, figure("prefix_cache_hits")
    for prompt in SHARED:
        tokens = ask(server, prompt, what, replica=replica, temperature=0)
        check(text_model, prompt, tokens, f"{what}, a prefix in the cache")
    wait_until_idle(server)
    assert figure("generation_tokens") > made, f"requests for replica {replica} went to another one"
    if not (is_preempted and figure("prefix_cache_hits") > before):
        require_small_blocks("no request is preempted, and no prefix is kept for others,")
        missing = "the prefix cache was not hit" if is_preempted else "nothing was preempted"
        raise AssertionError(f"replica {replica}: {missing}")


def test_balance(server: str, text_model: TinyModel) -> None:
    """Requests at once, which the server shares out among both replicas."""
    name = "vllm:generation_tokens_total"
    before = [gauge(server, name, engine=replica) for replica in (0, 1)]
    for prompt, tokens in zip(PROMPTS, ask_all(server, PROMPTS, "requests at once", temperature=0), strict=True):
        check(text_model, prompt, tokens, "requests at once")
    wait_until_idle(server)
    idle = [replica for replica in (0, 1) if gauge(server, name, engine=replica) == before[replica]]
    assert not idle, f"replica {idle} had none of {len(PROMPTS)} requests"


def test_nothing_is_compiled(server: str, tmp_path: Path) -> None:
    """No replica compiles anything once the server has started."""
    warm = count_compilations(server, tmp_path)
    assert len(warm) == 2, f"{len(warm)} replicas answered"
    for count in (1, 2, 4):
        for replica in (0, 1):
            ask_all(server, PROMPTS[-count:], f"replica {replica}", replica=replica, temperature=0)
    assert count_compilations(server, tmp_path) == warm, "a replica has compiled something while it served"
