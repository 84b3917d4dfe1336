"""One side of benchmarks.throughput, .speculation or .lora: an engine that runs the workloads it is told.

Imports nothing of the project. Reads JSON lines of the arguments of ``generate``, answers each with a line of what
``counts`` returns; the first line is what ``memory`` returns, and says that it is ready.
"""

import json
import os
import random
import sys
from collections.abc import Sequence

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest


def generate(llm: LLM, batch: int, prompt_tokens: int, new_tokens: int, adapters: Sequence[str] = ()) -> None:
    """Random prompts, every one answered with exactly so many greedy tokens; ``adapters``: paths, which take turns."""
    numbers = random.Random(batch)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [
        TokensPrompt(prompt_token_ids=[numbers.randrange(vocabulary) for _ in range(prompt_tokens)])
        for _ in range(batch)
    ]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    requests = [LoRARequest(path, number, path) for number, path in enumerate(adapters, 1)]
    chosen = [requests[index % len(requests)] for index in range(batch)] if requests else None
    llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)


def memory(llm: LLM) -> dict[str, int]:
    """Bytes of the model's weights, and of the slots for adapters."""
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    stacks: dict[int, torch.Tensor] = {}
    for layer in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stack = getattr(layer, name, ())
            stacks |= {id(each): each for each in (stack if isinstance(stack, tuple) else (stack,))}
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {"weights": weights, "slots": sum(each.nbytes for each in stacks.values())}


def counts(llm: LLM) -> dict[str, float]:
    """Counts of drafts since the engine started; empty if it keeps no statistics."""
    if not llm.llm_engine.log_stats:
        return {}
    drafts = [metric for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode_num")]
    return {metric.name: metric.value for metric in drafts if hasattr(metric, "value")}


def main() -> None:
    # vLLM's own output goes to the error stream, so that standard output has the answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    llm = LLM(**json.loads(sys.argv[1]))
    print(json.dumps(memory(llm)), file=answers)
    for line in sys.stdin:
        generate(llm, **json.loads(line))
        print(json.dumps(counts(llm)), file=answers)


if __name__ == "__main__":
    main()
