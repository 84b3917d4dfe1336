"""Changes some options of a shared configuration: here to draw the likeliest token only, which is greedy.

    python examples/override_config.py

On the command line: vllm serve MODEL --additional-config '{"override-neuron-config": {...}}'.
`python -m neuron_runner.config_help` lists the options.
"""

from pathlib import Path

from vllm import LLM, SamplingParams

MODEL = Path(__file__).parent / "models" / "kjv-2m"
# As it might be written in a file that many share.
STANDARD = {
    "num_batched_tokens_buckets": [64],
    "num_seqs_buckets": [4],
    "context_length_buckets": [128],
    "on_device_sampling_config": {"global_topk": 256},
}


def main() -> None:
    override = {"num_seqs_buckets": [2], "on_device_sampling_config": {"global_topk": 1}}
    llm = LLM(
        str(MODEL),
        max_num_seqs=2,  # The standard configuration is for 4, and would be refused.
        max_num_batched_tokens=64,
        max_model_len=128,
        additional_config={"neuron_config": STANDARD, "override_neuron_config": override},
    )
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, max_tokens=24)
    for output in llm.generate(["In the beginning God created", "A wise man"], params):
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
