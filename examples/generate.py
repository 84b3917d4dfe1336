"""The main job: several prompts through vllm.LLM on NeuronModelRunner, with a summary of what it took.

python3.11 dev.py generate --prompt "In the beginning" --temperature 0
"""

import argparse
import os
import time
from pathlib import Path

MODEL = Path(__file__).parent / "models" / "kjv-2m"
PROMPTS = [
    "In the beginning God created",
    "And it came to pass, when the king heard",
    "Blessed are they that",
    "The LORD is my shepherd;",
    "Go ye therefore into the city,",
    "Now these are the names of the sons of",
    "A wise man",
    "And the angel said unto her,",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="a local checkpoint; the bundled one if left out")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--enforce-eager", action="store_true", help="no compilation, for debugging")
    args = parser.parse_args()

    # One process, so that the compilation counters are this program's own; and only warnings beside the progress bar.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    from neuron_runner.metrics import CompilationCount

    started = time.perf_counter()
    at_start = CompilationCount.now()
    llm = LLM(
        args.model,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        seed=args.seed,
        enforce_eager=args.enforce_eager,
        # A few prompts: a quick start is worth more than steps without padding.
        additional_config={"neuron_config": {"max_padding": 0.4}},
    )
    warm = CompilationCount.now()
    ready = time.perf_counter()
    sampling = SamplingParams(temperature=args.temperature, top_p=0.9, max_tokens=args.max_tokens, seed=args.seed)
    outputs = llm.generate(args.prompt or PROMPTS, sampling)
    done = time.perf_counter()
    later = CompilationCount.now()

    for output in outputs:
        print(f"\n{output.prompt}\033[1m{output.outputs[0].text}\033[0m")
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    print(f"\n{tokens} tokens in {done - ready:.2f} s: {tokens / (done - ready):.0f} tokens/s")
    built, late = warm.compilations - at_start.compilations, later.compilations - warm.compilations
    print(f"{len(runner.graph_policy.sizes)} model graphs, {built} XLA compilations in all; {late} after warm-up")
    print(f"{ready - started:.1f} s from start to ready")


if __name__ == "__main__":
    main()
