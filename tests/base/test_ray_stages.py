"""Pipeline stages that Ray starts: each has the tokens of the reference, and the end of one ends the engine."""

import os
import signal
from collections.abc import Callable, Iterator
from threading import Timer

import pytest
from ray_cluster import engine_by_ray
from vllm import LLM
from vllm.v1.engine.exceptions import EngineDeadError

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.vllm_compat.probes.config import RAY_CALLS_WORKERS

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(not RAY_CALLS_WORKERS, reason="this release's Ray executor has no stages here"),
]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stages(model: TinyModel) -> Iterator[LLM]:
    options = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 32, "max_model_len": 128}
    modes = {"enforce_eager": True, "async_scheduling": True}
    with engine_by_ray(model.path, {"GPU": 2}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, **options, **modes) as llm:
        yield llm


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
