"""int8 weights: the same prompts on the bundled model as it is and stored as int8, and the bytes of both.

python examples/quantization.py
"""

import gc
import os
from pathlib import Path
from typing import Any

# One process, so that a second engine may follow the first; and only warnings next to the progress bars.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

MODEL = Path(__file__).parent / "models" / "kjv-2m"
PROMPTS = ["In the beginning God created", "The LORD is my shepherd;"]
# Few sizes: a quick start is worth more here than steps without padding.
FEW_BUCKETS = {
    "num_batched_tokens_buckets": [64],
    "num_seqs_buckets": [4],
    "context_length_buckets": [128],
}


def generate(neuron_config: dict[str, Any]) -> None:
    llm = LLM(
        str(MODEL),
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        additional_config={"neuron_config": FEW_BUCKETS | neuron_config},
    )
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40)):
        print(f"\n{output.prompt}\033[1m{output.outputs[0].text}\033[0m")
    (weights,) = llm.apply_model(lambda model: sum(parameter.nbytes for parameter in model.parameters()))
    print(f"\nbytes of weights with {neuron_config or 'the defaults'}: {weights:,}")
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def main() -> None:
    generate({})
    generate({"quant_dtype": "s8"})


if __name__ == "__main__":
    main()
