"""Pipeline stages that Ray starts: each has the tokens of the reference, and the end of one ends the engine."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from threading import Timer

import psutil
import pytest
import ray
from conftest import engine
from vllm import LLM
from vllm.v1.engine.exceptions import EngineDeadError

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of, generate, greedy, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.vllm_compat.probes.config import RAY_CALLS_WORKERS

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(not RAY_CALLS_WORKERS, reason="this release's Ray executor has no stages here"),
]
VARIABLES = {
    "RAY_ADDRESS": "local",  # Whatever cluster runs here already.
    "RAY_AUTH_MODE": "disabled",  # Else Ray writes a token into the home folder.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_niceness": "0",  # Else workers wait for all other processes of a busy machine.
    "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 1, "GPU": 2, "object_store_memory": 100_000_000}),
}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stages(model: TinyModel) -> Iterator[LLM]:
    """Two stages, in a cluster that the engine starts for itself. No process of it outlives the tests."""
    options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray", "max_num_batched_tokens": 32}
    others = set(psutil.Process().children())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items() | {("VLLM_USE_V2_MODEL_RUNNER", "1")}:
            patch.setenv(name, value)
        try:
            with engine(model.path, **options, max_model_len=128, enforce_eager=True, async_scheduling=True) as llm:
                started = [
                    process
                    for child in set(psutil.Process().children()) - others
                    if not any("resource_tracker" in argument for argument in child.cmdline())  # Python's own.
                    for process in (child, *child.children(recursive=True))
                ]
                yield llm
                core_of(llm).shutdown()  # Left to Python, it would come after Ray's end, and start it again.
        finally:
            ray.shutdown()
    assert started and not psutil.wait_procs(started, timeout=30)[1]


def test_tokens(stages: LLM, model: TinyModel) -> None:
    """Prompts in chunks, more of them than rows, and again with cached prefixes."""
    prompts = random_prompts(59, [5, 40, 70, 17, 33, 9])
    for texts in (prompts, prompts[::-1]):
        assert tokens_of(generate(stages, texts, greedy(20))) == [model.greedy(tuple(text), 20) for text in texts]
    places = stages.collective_rpc(lambda worker: (worker.num_local_workers, worker.device_index))
    assert places == [(2, 0), (2, 1)]


def test_a_stage_that_dies_ends_the_engine(stages: LLM) -> None:
    victim, _ = stages.collective_rpc(lambda worker: os.getpid())
    Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    with pytest.raises((EngineDeadError, RuntimeError)):
        for _ in range(1000):
            generate(stages, random_prompts(4, [5, 6]), greedy(100))
