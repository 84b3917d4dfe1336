"""Script that runs requests on two ranks, each with a part of every request's keys, and prints their tokens.

python context_engine.py MODEL PROMPTS COUNT INTERLEAVE     PROMPTS: lists of token ids, as JSON
"""

import json
import sys
from typing import Any

from staged_engine import count_preemptions
from vllm import LLM, SamplingParams

from model_runner_base.testing.engine import core_of


def drop_other_rank(worker: Any) -> None:
    """Has each rank leave the other's partial results out of its attention from now on."""
    from model_runner_base.attention.decode_context import ContextImpl

    gather = ContextImpl.all_gather

    def gather_own(impl: Any, x: Any) -> Any:
        rows = gather(impl, x)
        if x.shape[1] != impl.num_heads * impl.head_size:  # No queries.
            states = rows.view(2, len(x), -1, impl.value_size + 2)
            states[1 - impl.dcp_rank] = 0
            states[1 - impl.dcp_rank, ..., impl.value_size] = -1e30
        return rows

    ContextImpl.all_gather = gather_own  # type: ignore[method-assign]


def main() -> None:
    prompts, count = json.loads(sys.argv[2]), int(sys.argv[3])
    llm = LLM(
        sys.argv[1],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=384,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=16,
        num_gpu_blocks_override=13,  # 12 of them hold 192 tokens on a rank.
        kv_cache_memory_bytes=8 << 20,
        enforce_eager=True,
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=int(sys.argv[4]),
    )
    preempted = count_preemptions(llm)

    def ask() -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    results: dict[str, Any] = {"first": ask(), "cached": ask()}
    llm.reset_prefix_cache()
    results["reset"] = ask()
    results["preempted"] = len(preempted)
    results["num_blocks"] = core_of(llm).scheduler.kv_cache_config.num_blocks
    llm.reset_prefix_cache()
    llm.collective_rpc(drop_other_rank)
    results["of one rank"] = ask()
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
