"""Continues several prompts with vllm.LLM on NeuronModelRunner: one bar until it is ready, then the texts as they come.

python3.11 dev.py generate --prompt "In the beginning" --temperature 0

The speed and the number of compilations come last.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

MODEL = Path(__file__).parent / "models" / "kjv-2m"
ADAPTER = MODEL.with_name("kjv-modern")
SEEING_MODEL = MODEL.with_name("shapes")
SPECULATION = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "model": str(MODEL.with_name("kjv-draft"))},
    "eagle": {"method": "eagle", "model": str(MODEL.with_name("kjv-eagle"))},
    "eagle3": {"method": "eagle3", "model": str(MODEL.with_name("kjv-eagle3"))},
    "medusa": {"method": "medusa", "model": str(MODEL.with_name("kjv-medusa"))},
}
"""Speculative configs by method, without the number of drafts."""
NUM_DRAFTS = 3
MAX_LORA_RANK = 16
STEPS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
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
QUESTIONS = ["What is in the picture?", "Which colour is it?"]


def read_prompts(args: argparse.Namespace) -> list[Any]:
    """Inputs of vLLM: texts, or questions with a picture each."""
    if args.image is None:
        return args.prompt or PROMPTS
    from PIL import Image

    paths = args.image or sorted((SEEING_MODEL / "pictures").iterdir())
    return [
        {"prompt": f"<image>{question}", "multi_modal_data": {"image": Image.open(path).convert("RGB")}}
        for path in paths
        for question in args.prompt or QUESTIONS
    ]


class StartBar:
    """One bar from the first import to the first token, with what is done now."""

    def __init__(self) -> None:
        form = "{desc:<32}|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]"
        self._bar = tqdm(total=2, desc="Importing vLLM", bar_format=form, file=sys.stderr)

    def next(self, what: str) -> None:
        """Moves on, and says what is done from now on."""
        self._bar.set_description_str(what, refresh=False)
        self._bar.update()

    def sizes(self, made: Iterable[None], total: int, **_: Any) -> Iterator[None]:
        """Iterator over step sizes that are made, in place of the warm-up's own bar."""
        self._bar.total += total
        self._bar.set_description_str(f"Making {total} step sizes")
        for size in made:
            self._bar.update()
            yield size

    def close(self, what: str) -> None:
        self.next(what)
        self._bar.close()


def generate(llm: Any, prompts: list[Any], sampling: Any, adapter: Any) -> int:
    """Prints every prompt with its text as it comes, one after the other; returns the number of tokens."""
    engine = llm.llm_engine
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, sampling, lora_request=adapter)
    outputs: dict[int, Any] = {}
    shown, text = 0, None  # Texts that are shown as a whole, and what is shown of the next one.
    while shown < len(prompts):
        for output in engine.step() if engine.has_unfinished_requests() else ():
            outputs[int(output.request_id)] = output
        while (output := outputs.get(shown)) is not None:
            if text is None:
                print(f"\n{output.prompt}", end="")
            new = output.outputs[0].text
            print(f"\033[1m{new[len(text or '') :]}\033[0m", end="", flush=True)
            text = new
            if not output.finished:
                break
            print()
            shown, text = shown + 1, None
    return sum(len(output.outputs[0].token_ids) for output in outputs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local checkpoint; a bundled one if left out")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--warm-up",
        choices=["background", "full"],
        default="background",
        help="full: every size before the first prompt",
    )
    parser.add_argument(
        "--speculative",
        choices=SPECULATION,
        help="how tokens are drafted, which a step then verifies together; the text is the same as without",
    )
    parser.add_argument(
        "--lora",
        nargs="?",
        const=str(ADAPTER),
        help="a LoRA adapter that every prompt is continued with; the bundled one if no path is given",
    )
    parser.add_argument(
        "--image",
        nargs="*",
        help="pictures that each prompt asks about; bundled ones, and a bundled vision model, if no path is given",
    )
    parser.add_argument("--enforce-eager", action="store_true", help="no compilation, for debugging")
    args = parser.parse_args()

    # One process, so that the compilation counters are this program's own; and only warnings next to the progress bar.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    started = time.perf_counter()
    bar = StartBar()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from model_runner_base.runner import warm_up

    warm_up.tqdm = bar.sizes  # type: ignore[assignment, misc]
    bar.next("Starting the engine")
    llm = LLM(
        args.model or str(MODEL if args.image is None else SEEING_MODEL),
        max_num_seqs=16,
        max_num_batched_tokens=512,
        seed=args.seed,
        enforce_eager=args.enforce_eager,
        speculative_config=args.speculative and SPECULATION[args.speculative] | {"num_speculative_tokens": NUM_DRAFTS},
        disable_log_stats=args.speculative is None,
        enable_lora=args.lora is not None,
        max_lora_rank=MAX_LORA_RANK,
        # A few prompts: a quick start is worth more than steps without padding.
        additional_config={"neuron_config": {"max_padding": 0.4, "warm_up": args.warm_up}},
        use_tqdm_on_load=False,
    )
    from neuron_runner.metrics import CompilationCount  # After the engine has chosen the device.

    ready, warm = time.perf_counter(), CompilationCount.now()
    policy = llm.llm_engine.model_executor.driver_worker.worker.model_runner.graph_policy
    num_ready = len(policy.offered)
    sampling = SamplingParams(temperature=args.temperature, top_p=0.9, max_tokens=args.max_tokens, seed=args.seed)
    adapter = LoRARequest(Path(args.lora).name, 1, args.lora) if args.lora else None
    bar.close("Ready")
    tokens = generate(llm, read_prompts(args), sampling, adapter)
    done = time.perf_counter()
    later = CompilationCount.now()

    print(f"\n{tokens} tokens in {done - ready:.2f} s: {tokens / (done - ready):.0f} tokens/s")
    if args.speculative:
        counts = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in (STEPS, ACCEPTED)}
        print(f"{1 + counts[ACCEPTED] / counts[STEPS]:.2f} tokens a step of a request, with {NUM_DRAFTS} drafts")
    built, since = warm.compilations, later.compilations - warm.compilations
    print(f"{num_ready} of {len(policy.sizes)} model graphs when ready, {built} XLA compilations until then")
    print(f"{len(policy.offered)} of them at the end, {since} compilations while steps ran")
    print(f"{ready - started:.1f} s from start to ready")


if __name__ == "__main__":
    main()
