"""Replicas behind a balancer of the user's: a server for each, with a port and an end of its own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from greedy import expected
from lane import HAS_OPENXLA, WITH_PLAIN_PLATFORM
from serving import served
from vllm.config import ParallelConfig

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.processes import ask, kill
from model_runner_base.testing.server import flags
from model_runner_base.testing.tokenizer import add_tokenizer
from model_runner_base.vllm_compat.probes.config import (
    note_local_replicas,
    num_local_replicas,
    serve_own_replicas_alone,
)
from model_runner_base.worker import ModelRunnerWorker

PROMPTS = random_prompts(24, [5, 40, 17, 70])
COUNT = 12


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return add_tokenizer(tiny_model("llama"))


@pytest.fixture(scope="module")
def urls(model: TinyModel) -> Iterator[list[str]]:
    """A server for each of two replicas. They start at the same time, and know nothing of each other."""
    shared = {"served_model_name": "kit", "dtype": "float32", "enforce_eager": True, "max_model_len": 128}
    shared |= {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 8 << 20}
    shared |= {"data_parallel_size": 2, "data_parallel_size_local": 1}
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def start(replica: int) -> str:
            options = flags(shared | {"data_parallel_start_rank": replica})
            return stack.enter_context(served(model.path, *options, **WITH_PLAIN_PLATFORM))

        yield [*pool.map(start, range(2))]


@pytest.mark.newest
def test_each_server_has_the_tokens_of_one_engine(urls: list[str], model: TinyModel) -> None:
    """Tokens of either server; when one has ended, the other one serves on."""
    tokens = expected(model, PROMPTS, COUNT)
    for url in urls:
        assert [ask(url, prompt, url, COUNT, temperature=0) for prompt in PROMPTS] == tokens
    kill(urls[1], "EngineCore", PROMPTS)
    assert [ask(urls[0], prompt, "the server that is left", COUNT, temperature=0) for prompt in PROMPTS] == tokens


@pytest.mark.parametrize(("num_local", "rank"), [(1, 3), (2, 2)], ids=["external", "hybrid"])
def test_a_server_knows_its_own_replicas_alone(num_local: int, rank: int) -> None:
    """Replicas count from the first device that their server sees, and none waits for another server's."""
    mode = "data_parallel_external_lb" if num_local == 1 else "data_parallel_hybrid_lb"
    options = {"data_parallel_size_local": num_local, "data_parallel_rank": rank, mode: True}
    hosts = {"nnodes": 4 // num_local, "node_rank": rank // num_local}
    parallel = ParallelConfig(data_parallel_size=4, data_parallel_master_ip="10.77.0.1", **options, **hosts)
    note_local_replicas(parallel)
    serve_own_replicas_alone(parallel)
    alone = ParallelConfig(data_parallel_size=num_local, data_parallel_size_local=num_local)
    names = ("size", "size_local", "rank", "index", "external_lb", "hybrid_lb", "master_ip", "rank_local")
    found, usual = ([getattr(each, f"data_parallel_{name}") for name in names] for each in (parallel, alone))
    assert found == usual
    assert (parallel.nnodes, parallel.node_rank) == (1, 0)
    assert num_local_replicas(parallel) == num_local
    worker = SimpleNamespace(parallel_config=parallel, local_rank=0)
    for index in range(num_local):
        if num_local > 1:
            parallel.data_parallel_rank_local = index  # As vLLM does in the process of a replica.
        device = ModelRunnerWorker.device_index.fget(worker)  # type: ignore[attr-defined]
        # vLLM 0.16 hides the devices of the other replicas.
        assert device == (0 if HAS_OPENXLA else index)
