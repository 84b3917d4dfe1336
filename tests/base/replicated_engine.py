"""Script that serves a model with experts by two replicas, and prints what each of a list of requests got.

python replicated_engine.py MODEL WHOLE     WHOLE: 1 for experts that are whole on one of the replicas each
"""

import asyncio
import json
import sys
from typing import Any

from staged_engine import SEED, fail_admission
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from model_runner_base.errors import RequestError
from model_runner_base.testing.cases import random_prompts

PROMPTS = random_prompts(137, [1, 90, 33, 130, 5, 70])
COUNTS = [30, 4, 12, 20, 9, 17]
"""Numbers of tokens of the prompts: requests end at other steps on each replica."""


def stay_away(worker: Any) -> None:
    """Planted fault: has a replica without tokens not join steps of the other one."""
    worker.model_runner.parts.components.run_idle = lambda: None


async def ask(engine: AsyncLLM, name: str, index: int, replica: int | None, **options: Any) -> list[int] | str:
    """Tokens of a prompt; the reason, if the request failed."""
    options = {"max_tokens": COUNTS[index], "temperature": 0, "ignore_eos": True, "detokenize": False} | options
    prompt = {"prompt_token_ids": list(PROMPTS[index])}
    try:
        async for last in engine.generate(prompt, SamplingParams(**options), name, data_parallel_rank=replica):
            answer = last
    except RequestError as error:
        return str(error)
    return list(answer.outputs[0].token_ids)


async def ask_all(engine: AsyncLLM, name: str, replicas: list[int | None]) -> list[Any]:
    """Answers to all prompts at once, each of the replica in turn; None: of the one that the server takes."""
    asked = [ask(engine, f"{name} {i}", i, replicas[i % len(replicas)]) for i in range(len(PROMPTS))]
    return await asyncio.gather(*asked)


async def ask_while_others_leave(engine: AsyncLLM) -> list[Any]:
    """Answers of replica 0 while a request of replica 1 is aborted, and others fail at once."""
    left = asyncio.create_task(ask(engine, "left", 4, 1, max_tokens=200))
    asked = asyncio.create_task(ask_all(engine, "beside", [0]))
    await asyncio.sleep(0.2)
    left.cancel()
    failed = [await ask(engine, f"failed {i}", 4, 1, seed=SEED) for i in range(2)]
    return [await asked, failed]


async def ask_across_a_pause(engine: AsyncLLM) -> list[Any]:
    """Answers to requests that a pause holds up, and to one that comes while it lasts."""
    asked = asyncio.create_task(ask_all(engine, "paused", [0, 1]))
    await asyncio.sleep(0.2)
    await engine.pause_generation(mode="keep")
    late = asyncio.create_task(ask(engine, "late", 2, 1))
    await asyncio.sleep(0.2)
    await engine.resume_generation()
    return [await asked, await late]


async def main(model: str, is_whole: bool) -> None:
    limits = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 8 << 20}
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True}
    options |= {"data_parallel_size": 2, "enable_expert_parallel": is_whole}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **limits, **options))
    try:
        results: dict[str, Any] = {}
        for name, replicas in (("first", [0]), ("second", [1]), ("both", [0, 1]), ("any", [None])):
            results[name] = await ask_all(engine, name, replicas)
        await engine.collective_rpc(fail_admission)
        results["alone"] = [await ask(engine, "alone", 4, 0, seed=SEED), await ask(engine, "after", 4, 0)]
        results["beside"], results["failed"] = await ask_while_others_leave(engine)
        results["paused"], results["late"] = await ask_across_a_pause(engine)
        await engine.collective_rpc(stay_away)
        try:
            await ask(engine, "waits", 0, 0)
        except Exception as error:
            results["stays away"] = type(error).__name__
        print("RESULT", json.dumps(results), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] == "1"))
