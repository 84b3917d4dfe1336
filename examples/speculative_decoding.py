"""A drafter guesses the next tokens, and one step of the model verifies them: the same text in fewer steps.

    python examples/speculative_decoding.py draft_model     a smaller model of the same family drafts
    python examples/speculative_decoding.py eagle           a head over the model's own hidden states does

Older guides give `speculative_model` and `num_speculative_tokens` each by itself; vLLM takes one `speculative_config`.
"""

import argparse
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

MODELS = Path(__file__).parent / "models"
PROMPTS = ["In the beginning God created", "And it came to pass, when the king heard", "A wise man"]
EXAMPLES: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": str(MODELS / "kjv-draft"), "num_speculative_tokens": 3},
    # No method: the head's config.json has "is_eagle": true.
    "eagle": {"model": str(MODELS / "kjv-eagle"), "num_speculative_tokens": 3},
}
STEPS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", nargs="?", choices=EXAMPLES, default="draft_model")
    args = parser.parse_args()
    llm = LLM(
        str(MODELS / "kjv-2m"),
        speculative_config=EXAMPLES[args.example],
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=128,
        disable_log_stats=False,  # Steps and drafts are counted.
        # Few graphs, for a quick start.
        additional_config={
            "neuron_config": {"num_batched_tokens_buckets": 64, "num_seqs_buckets": 2, "context_length_buckets": 128}
        },
    )
    # The likeliest token alone is left to draw: greedy by another name.
    for output in llm.generate(PROMPTS, SamplingParams(top_k=1, max_tokens=48)):
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
    counts = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in (STEPS, ACCEPTED)}
    print(f"Tokens a step of a request: {1 + counts[ACCEPTED] / counts[STEPS]:.2f}")


if __name__ == "__main__":
    main()
