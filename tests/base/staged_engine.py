"""Script that runs the same requests in one process and in two stages of a pipeline, and prints what came out.

python staged_engine.py MODEL ASYNC     ASYNC: 1 for asynchronous scheduling of the stages
"""

import json
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vllm import LLM, SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of

PROMPTS = random_prompts(59, [5, 40, 70, 17, 33, 9, 64, 21])
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0.8, "seed": 4, "presence_penalty": 1.5, "min_tokens": 9},
    {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
]
NUM_TOKENS = 24
FAILING, SEED = 1, 13
"""Index of a prompt, and a seed with which requests fail."""


def start(model: str, **options: Any) -> LLM:
    return LLM(
        model,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=16,
        num_gpu_blocks_override=11,  # So few that some requests are preempted.
        kv_cache_memory_bytes=8 << 20,
        enforce_eager=True,
        **options,
    )


def params_of(index: int) -> SamplingParams:
    options = OPTIONS[index % len(OPTIONS)]
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **options)


def ask(llm: LLM, seeds: Mapping[int, int] = MappingProxyType({})) -> list[Any]:
    """Tokens of all prompts, and log probabilities where they are asked for; of a request that fails, the reason.

    ``seeds`` replace the seeds of prompts, by index.
    """
    params = [params_of(index) for index in range(len(PROMPTS))]
    for index, seed in seeds.items():
        params[index].seed = seed
    outputs = llm.generate([{"prompt_token_ids": list(each)} for each in PROMPTS], params, use_tqdm=False)
    return [
        each.outputs[0].stop_reason
        or [list(each.outputs[0].token_ids), rounded(each.prompt_logprobs), rounded(each.outputs[0].logprobs)]
        for each in outputs
    ]


def rounded(places: Any) -> Any:
    return places and [at and {token: round(each.logprob, 3) for token, each in at.items()} for at in places]


def abort_one(llm: LLM) -> None:
    """Aborts a request while it is in flight."""
    engine = llm.llm_engine
    engine.add_request("aborted", {"prompt_token_ids": [1, 2, 3]}, params_of(0))
    for _ in range(4):
        engine.step()
    engine.abort_request(["aborted"])
    while engine.has_unfinished_requests():
        engine.step()


def count_preemptions(llm: LLM) -> list[str]:
    """List that gets the id of each request that is preempted from now on."""
    scheduler, found = core_of(llm).scheduler, list[str]()
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        found.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return found


def count_repeats(worker: Any) -> None:
    repeat = worker.model_runner.parts.repeat
    advance, worker.counts = repeat.advance, [0, 0]

    def counted(schedule: Any) -> Any:
        advanced = advance(schedule)
        worker.counts[advanced is not None] += 1
        return advanced

    repeat.advance = counted


def counts(worker: Any) -> list[int]:
    return worker.counts


def fail_admission(worker: Any) -> None:
    """Has the runner fail to admit requests with ``SEED``."""
    head = worker.model_runner.parts.head
    admit = head.admit

    def fails(row: int, info: Any, token_ids: list[int]) -> None:
        if info.params.seed == SEED:
            raise IndexError(f"nothing at {SEED}")
        admit(row, info, token_ids)

    head.admit = fails


def fail_on_last(worker: Any) -> None:
    """Has the last stage fail to admit requests with ``SEED``."""
    if worker.rank == 1:
        fail_admission(worker)


def break_first(worker: Any) -> None:
    """Has the next step fail on the first stage."""

    def fail(schedule: Any) -> None:
        raise ValueError("broken on purpose")

    if worker.rank == 0:
        worker.model_runner.parts.components.begin_step = fail


def main() -> None:
    llm = start(sys.argv[1])
    one = ask(llm)
    del llm
    llm = start(sys.argv[1], pipeline_parallel_size=2, async_scheduling=sys.argv[2] == "1")
    preempted = count_preemptions(llm)
    llm.collective_rpc(count_repeats)
    two = ask(llm)
    repeats = llm.collective_rpc(counts)
    cached = ask(llm)
    abort_one(llm)
    later = ask(llm)
    llm.collective_rpc(fail_on_last)
    failing = ask(llm, {FAILING: SEED})
    llm.collective_rpc(break_first)
    before = time.monotonic()
    try:
        ask(llm)
    except Exception as error:
        message = str(error)
    result = {"one": one, "two": two, "cached": cached, "later": later, "repeats": repeats, "message": message}
    result |= {"preempted": preempted, "failing": failing}
    print("RESULT", json.dumps(result | {"seconds": time.monotonic() - before}), flush=True)


if __name__ == "__main__":
    main()
