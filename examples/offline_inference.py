"""Four prompts through two places of a batch: when one is finished, the next takes its place while the other goes on.

python examples/offline_inference.py [MODEL]     the bundled model if left out
"""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

MODEL = Path(__file__).parent / "models" / "kjv-2m"
PROMPTS = [
    "In the beginning God created",
    "And it came to pass, when the king heard",
    "Blessed are they that",
    "The LORD is my shepherd;",
]


def main() -> None:
    llm = LLM(
        sys.argv[1] if len(sys.argv) > 1 else str(MODEL),
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=128,
        # Few graphs, for a quick start. Without these lists as many are made as keep padding low.
        additional_config={
            "neuron_config": {"num_batched_tokens_buckets": 64, "num_seqs_buckets": 2, "context_length_buckets": 128}
        },
    )
    # Different lengths, so that the requests do not end together. Add temperature=0.8, top_p=0.95 to draw instead.
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (32, 8, 16, 24)]
    for output in llm.generate(PROMPTS, params):
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
