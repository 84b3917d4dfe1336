"""Sizes chosen by hand, with transformers-neuronx's two variables: which graphs are made, and what fits none.

    python examples/bucketing.py

The same by config: LLM(additional_config={"neuron_config": {"num_batched_tokens_buckets": [32, 64],
"context_length_buckets": [64, 128], "num_seqs_buckets": [2]}}).
"""

import os
from pathlib import Path

from vllm import LLM, SamplingParams

MODEL = Path(__file__).parent / "models" / "kjv-2m"

# Tokens of a step that takes prompts in: the last is max_num_batched_tokens.
os.environ["NEURON_CONTEXT_LENGTH_BUCKETS"] = "32,64"
# Tokens of a decoding request, in the mean of the batch: the last is max_model_len.
os.environ["NEURON_TOKEN_GEN_BUCKETS"] = "64,128"
# The engine in this process, so that its graphs can be shown.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    llm = LLM(
        str(MODEL),
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=128,
        additional_config={"neuron_config": {"num_seqs_buckets": [2]}},
    )
    policy = llm.llm_engine.model_executor.driver_worker.worker.model_runner.graph_policy
    for size in policy.sizes:
        numbers = [f"{n} {dim.name.replace('_', ' ')}" for dim, n in zip(policy.dims, size.dims, strict=True) if n]
        print(f"Graph: {size.kind}", *numbers, sep=", ")
    greedy = SamplingParams(temperature=0, max_tokens=16)
    # More tokens than the largest prompt bucket: the prompt is taken in two chunks.
    prompt = "And the angel said unto her, Fear not: " * 6
    (output,) = llm.generate([prompt], greedy)
    print(f"Prompt of {len(output.prompt_token_ids)} tokens, Generated text: {output.outputs[0].text!r}")
    # More tokens than the largest context: refused, never cut.
    try:
        llm.generate([prompt * 6], greedy)
    except ValueError as error:
        print(f"Refused: {error}")


if __name__ == "__main__":
    main()
