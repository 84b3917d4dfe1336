"""vLLM's Ray executor: the reference's tokens on every rank, each worker on its own core, an end when a rank dies."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from conftest import engine
from ray_cluster import engine_by_ray
from vllm import LLM, envs
from vllm.config import ParallelConfig
from vllm.ray.ray_env import get_env_vars_to_copy

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.engine import generate, greedy, sampled, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request
from neuron_runner import environment, ray_setup
from neuron_runner.metrics import CompilationCount
from neuron_runner.platform import NeuronPlatform
from neuron_runner.worker import NeuronWorker

FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [128]}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def pair(model: TinyModel) -> Iterator[LLM]:
    """An engine of two workers."""
    options = {"tensor_parallel_size": 2, "max_model_len": 128, "additional_config": {"neuron_config": FEW_BUCKETS}}
    with engine_by_ray(model.path, {}, {}, **options) as llm:
        yield llm


def test_requests_are_answered_as_by_the_reference_on_every_rank(pair: LLM, model: TinyModel) -> None:
    def state(worker: Any) -> tuple[CompilationCount, list[int]]:
        """State of a worker, read in it: its compilations, and the rows' last tokens; ranks may place a request in
        another row."""
        return CompilationCount.now(), sorted(worker.model_runner.parts.rows.tensors[0].tolist()[:-1])

    before = [count for count, _ in pair.collective_rpc(state)]
    prompts = random_prompts(1, [5, 40, 70, 17])
    assert tokens_of(generate(pair, prompts, greedy(20))) == [model.greedy(tuple(p), 20) for p in prompts]
    requests = [
        Request(prompts[0], greedy(16, repetition_penalty=1.4, frequency_penalty=0.5)),
        Request(prompts[1], sampled(16, top_k=5, top_p=0.9)),
    ]
    assert check_completions(pair, model, requests) > 0
    (zero, zeros_tokens), (one, ones_tokens) = pair.collective_rpc(state)
    assert zeros_tokens == ones_tokens
    assert [zero, one] == before, "graphs were compiled after warm-up"


def test_a_worker_that_dies_ends_the_engine(pair: LLM) -> None:
    _, victim = pair.collective_rpc(lambda worker: os.getpid())
    Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    # Ray sees the worker's end, or the other worker misses its part of a collective: who is first speaks.
    words = rf"(?s)RayWorkerWrapper.*pid: {victim}|CollectiveError.*another worker has ended"
    with pytest.raises(ray.exceptions.RayError, match=words):
        while True:
            generate(pair, random_prompts(4, [5, 6]), greedy(100))
    with pytest.raises(ray.exceptions.RayError):
        generate(pair, random_prompts(4, [5]), greedy(2))


# ---- Where a worker is ----


def parallel(executor: str, **options: Any) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=4, distributed_executor_backend=executor, **options)


@pytest.mark.parametrize(
    ("config", "local_workers"),
    [(parallel("ray"), 3), (parallel("mp"), 4), (parallel("mp", nnodes=2), 2)],
    ids=["ray", "mp", "mp-two-hosts"],
)
def test_workers_of_this_host(config: ParallelConfig, local_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's Ray executor names each worker the cores of all workers of its host; here three of four."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4,6,7")
    monkeypatch.setattr("model_runner_base.worker.current_platform", NeuronPlatform())
    worker: Any = SimpleNamespace(parallel_config=config)
    assert NeuronWorker._count_local_workers(worker) == local_workers


@pytest.mark.parametrize(
    ("config", "init_method", "root"),
    [
        (parallel("ray"), "tcp://10.0.0.5:40133", "10.0.0.5"),
        (parallel("ray"), "tcp://[fd00::5]:40133", "[fd00::5]"),
        (parallel("mp"), "tcp://127.0.0.1:40133", "127.0.0.1"),
        # vLLM hands out the loopback address there, and puts the master's in its place when ranks meet.
        (parallel("mp", nnodes=2, master_addr="10.0.0.1"), "tcp://127.0.0.1:40133", "10.0.0.1"),
        (parallel("external_launcher"), "env://", "10.0.0.9"),
    ],
)
def test_ranks_meet_at_the_host_of_the_first(
    config: ParallelConfig, init_method: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    worker: Any = SimpleNamespace(parallel_config=config, distributed_init_method=init_method)
    assert NeuronWorker._root_host(worker) == root


def test_worker_takes_its_own_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of four ranks is the first on its host, which shares out the cores 4 and 5, so it takes core 4."""
    monkeypatch.setattr(os, "environ", {"NEURON_RT_VISIBLE_CORES": "4,5"})
    environment.share_neuron_cores(2, 0, 4, "10.0.0.1")
    assert os.environ == {
        "NEURON_RT_VISIBLE_CORES": "4",
        "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:62182",
        "NEURON_PJRT_PROCESS_INDEX": "2",
        "NEURON_PJRT_WORLD_SIZE": "4",
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": "1,1,1,1",
    }


# ---- What Ray is told ----


def test_workers_take_over_what_neuron_and_xla_read(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = {"NEURON_CC_FLAGS": "--optlevel 1", "PJRT_DEVICE": "CPU", "XLA_FLAGS": "", "VLLM_NEURON_NKI": "0"}
    own = {"NEURON_RT_VISIBLE_CORES": "0,1", "NEURON_RT_NUM_CORES": "2", "GLOO_SOCKET_IFNAME": "eth0"}
    for name, value in (copied | own).items():
        monkeypatch.setenv(name, value)
    names = get_env_vars_to_copy(additional_vars=set(NeuronPlatform().additional_env_vars))
    assert copied.keys() <= names and not own.keys() & names


def test_a_cluster_of_the_engines_own_has_a_core_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 3}')
    for world_size, cores in ((2, 2), (4, 4), (1, 4)):
        ray_setup.give_cores(world_size)
        assert json.loads(os.environ["RAY_OVERRIDE_RESOURCES"]) == {"CPU": 3, "neuron_cores": cores}


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("VLLM_RAY_PER_WORKER_GPUS", "0.5", "takes one Neuron core, but VLLM_RAY_PER_WORKER_GPUS=0.5: leave it out"),
        ("NEURON_RT_VISIBLE_CORES", "0-3", "reads no ranges, but NEURON_RT_VISIBLE_CORES=0-3: name every core"),
    ],
)
def test_what_ray_would_not_do_is_refused(
    variable: str, value: str, message: str, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs.disable_envs_cache()  # An engine that has run has turned it on.
    monkeypatch.setenv(variable, value)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    with pytest.raises(ValueError, match=message), engine(model.path, **options):
        pass
