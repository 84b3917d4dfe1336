"""Replicas of an engine (data parallelism): each answers with the tokens of one, on the device that is its own."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from greedy import expected
from lane import HAS_OPENXLA
from scripts import results_of
from vllm.config import ParallelConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from model_runner_base.admission import our_engines
from model_runner_base.device_ops import MemoryInfo
from model_runner_base.inputs.adapters.adapters import NO_ADAPTERS
from model_runner_base.inputs.multimodal.encoder import NO_ENCODER
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.models import TinyModel
from model_runner_base.vllm_compat.patches.dead_engines import give_errors_at_once
from model_runner_base.vllm_compat.probes.config import note_local_replicas, num_local_replicas
from model_runner_base.worker import ModelRunnerWorker

PROMPTS = random_prompts(24, [5, 40, 17, 70])
COUNT = 12
RUN = """
import asyncio
import json
import sys

import psutil
from vllm import SamplingParams, envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def ask(engine, name, prompt, count, replica):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    async for output in engine.generate({"prompt_token_ids": prompt}, params, name, data_parallel_rank=replica):
        last = output
    return list(last.outputs[0].token_ids)


async def main(model, prompts, count):
    limits = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 8 << 20}
    options = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "data_parallel_size": 2}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **limits, **options))
    try:
        asked = [
            ask(engine, f"{replica} {index}", prompt, count, replica)
            for replica in (None, 0, 1)
            for index, prompt in enumerate(prompts)
        ]
        print("RESULT", json.dumps(await asyncio.gather(*asked)), flush=True)
        killed, other = (psutil.Process(each.pid) for each in engine.engine_core.resources.engine_manager.processes)
        killed.suspend()
        other.suspend()  # So it cannot end before vLLM kills it, five seconds after it was told to end.
        waiting = [asyncio.create_task(ask(engine, f"late {each}", prompts[0], count, each)) for each in (0, 1)]
        await asyncio.sleep(0.5)
        killed.kill()
        errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 120)
        seen = {"errors": [type(each).__name__ for each in errors], "is_other_there": other.is_running()}
        print("KILLED", json.dumps(seen | {"method": envs.VLLM_WORKER_MULTIPROC_METHOD}), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.newest
def test_replicas_have_the_tokens_of_one_engine(
    tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tokens are right from a replica that is asked by name, and from the one that the balancer takes.

    At the end one is killed. On vLLM 0.33, clients of both have an error before the other one has ended.
    """
    model, script = tiny_model("llama"), tmp_path_factory.mktemp("script") / "replicas.py"
    script.write_text(RUN)
    args = model.path, json.dumps(PROMPTS), COUNT
    env = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    said = results_of(script, *args, env=env, names=("RESULT", "KILLED"))
    assert said["RESULT"] == 3 * expected(model, PROMPTS, COUNT)
    killed = said["KILLED"]
    assert killed["errors"] == 2 * ["EngineDeadError"]
    assert killed["is_other_there"] or HAS_OPENXLA
    # A forked replica would share the signals of its server.
    assert killed["method"] == "spawn"


def test_a_front_end_that_ends_leaves_no_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose answer has not come gets an error; vLLM stops to read answers, and leaves it waiting."""
    monkeypatch.setattr(our_engines, "WORKERS", ["ours"])
    give_errors_at_once(our_engines.is_ours)

    async def end_one(worker: str) -> Any:
        front_end: Any = object.__new__(AsyncLLM)
        front_end.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker))
        front_end.output_processor = OutputProcessor(None, log_stats=False)
        front_end.output_handler = asyncio.create_task(asyncio.sleep(600))
        queue = RequestOutputCollector(RequestOutputKind.DELTA, "waiting")
        front_end.output_processor.request_states["waiting"] = SimpleNamespace(queue=queue)
        await asyncio.get_running_loop().run_in_executor(None, front_end.shutdown)
        with suppress(asyncio.CancelledError):
            await front_end.output_handler
        await asyncio.sleep(0)
        return queue.output

    assert isinstance(asyncio.run(end_one("ours")), EngineDeadError)
    assert asyncio.run(end_one("another library's")) is None


def test_a_replica_has_a_device_of_its_own() -> None:
    parallel = ParallelConfig(data_parallel_size=3, data_parallel_size_local=3)
    note_local_replicas(parallel)
    # As vLLM does in the process of a replica.
    parallel.data_parallel_size = parallel.data_parallel_size_local = 1
    parallel.data_parallel_rank_local = 2
    note_local_replicas(parallel)
    assert num_local_replicas(parallel) == 3
    worker = SimpleNamespace(parallel_config=parallel, local_rank=0)
    index = ModelRunnerWorker.device_index.fget(worker)  # type: ignore[attr-defined]
    # vLLM 0.16 hides the devices of the other replicas.
    assert index == (0 if HAS_OPENXLA else 2)


def test_a_size_that_is_given_is_held_to_what_is_free_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other replicas may have taken their part of the host's memory; a share of it is divided among all."""
    shares = list[MemoryInfo]()
    monkeypatch.setattr("model_runner_base.worker.host_cache_memory", lambda *args: shares.append(args[2]) or 5)
    runner = SimpleNamespace(
        device_ops=SimpleNamespace(memory_info=lambda: MemoryInfo(free=1000, total=4000)),
        profile_run=lambda: 100,
        useful_cache_memory=lambda: float("inf"),
        get_kv_cache_spec=dict,
        adapters=NO_ADAPTERS,
        encoder=NO_ENCODER,
    )
    worker: Any = SimpleNamespace(
        model_runner=runner,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=400),
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={}), kv_transfer_config=None
        ),
        num_local_workers=2,
        num_local_replicas=5,
        _weights_memory=0,
        _shares_host_memory=lambda: True,
        _num_sharing=lambda: ModelRunnerWorker._num_sharing(worker),
    )
    assert ModelRunnerWorker.determine_available_memory(worker) == 400
    worker.cache_config.kv_cache_memory_bytes = 401
    with pytest.raises(ValueError, match="lower kv_cache_memory_bytes"):
        ModelRunnerWorker.determine_available_memory(worker)
    worker.cache_config.kv_cache_memory_bytes = None
    assert ModelRunnerWorker.determine_available_memory(worker) == 5
    assert shares == [MemoryInfo(free=100, total=400)]
