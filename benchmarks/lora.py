"""Cost of LoRA adapters in a step: with ``enable_lora`` and 0, 1 and 4 of them in a batch, against LoRA off.

    python -m benchmarks.lora [--cases decode-1 decode-8 decode-32 prefill-256] [--rank 16] [--slots 4]

A Llama in float32 on openxla (PJRT CPU) with random weights: hidden 1,024, 2 layers (`--layers`), 16 heads of 64 with 4
KV heads, MLP 2,816, vocabulary of 8,192, some 40M parameters. Adapters are of all linear layers of attention and MLP.
Decode is 16 tokens a prompt and 48 new ones, counted with the time of that short prefill; prefill is one prompt of 256
tokens and one new token. Each case has two engines, LoRA off and LoRA on, in processes of their own with all cores each
while the other is idle. All runs take turns; ratios are the median of the turns'. What the engine without LoRA saves
where no adapter is in use is what a second family of graphs would save.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import BUNDLED_MODEL, saved_llama
from benchmarks.report import make_parser, show_tables, take_turns
from benchmarks.throughput import Side
from model_runner_base.testing.adapters import make_adapter

MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_ADAPTERS = (0, 1, 4)
CASES: dict[str, dict[str, int]] = {
    **{f"decode-{batch}": {"batch": batch, "prompt_tokens": 16, "new_tokens": 48} for batch in (1, 8, 32)},
    "prefill-256": {"batch": 1, "prompt_tokens": 256, "new_tokens": 1},
}


def engine(batch: int, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Engine options of both sides: a size for the prompts, and one for decode."""
    max_tokens = max(64, batch * prompt_tokens)
    length = 64 * -(-(prompt_tokens + new_tokens) // 64)
    buckets = {
        "num_seqs_buckets": [batch],
        "num_batched_tokens_buckets": [max_tokens],
        "context_length_buckets": [length],
        "warm_up": "full",
    }
    return {
        "max_model_len": length,
        "max_num_seqs": batch,
        "max_num_batched_tokens": max_tokens,
        "additional_config": {"neuron_config": buckets},
    }


def measure(name: str, off: Side, on: Side, adapters: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row for each number of adapters."""
    case = CASES[name]
    runs = {"off": partial(off.run, **case)}
    runs |= {str(count): partial(on.run, **case, adapters=adapters[:count]) for count in NUM_ADAPTERS}
    times = take_turns(runs, repeats)
    return [
        {
            "case": name,
            "adapters": count,
            "off_ms_a_step": median(times["off"]) / case["new_tokens"],
            "on_ms_a_step": median(times[str(count)]) / case["new_tokens"],
            "ratio": median(one / other for one, other in zip(times[str(count)], times["off"], strict=True)),
        }
        for count in NUM_ADAPTERS
    ]


def start_up(side: Side) -> dict[str, float]:
    """Seconds until the engine is ready, and megabytes of the model's weights and of the adapter slots."""
    return {
        "start_s": side.start_s,
        "weights_mb": side.memory["weights"] / 1e6,
        "slots_mb": side.memory["slots"] / 1e6,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rank", type=int, default=16, help="of the adapters and of the slots")
    parser.add_argument("--slots", type=int, default=4, help="max_loras")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    root = str(BUNDLED_MODEL.parents[2])
    start = partial(Side, sys.executable, {**os.environ, "PYTHONPATH": root, "VLLM_NEURON_RUNNER": "1"})
    lora = {"enable_lora": True, "max_loras": args.slots, "max_lora_rank": args.rank}
    rows: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    with saved_llama(num_hidden_layers=args.layers, **MODEL) as model, tempfile.TemporaryDirectory() as directory:
        adapters = [
            str(make_adapter(model, Path(directory), number, rank=args.rank, targets=TARGETS).path)
            for number in range(1, 1 + max(NUM_ADAPTERS))
        ]
        for name in args.cases:
            options = engine(**CASES[name]) | {"model": str(model)}
            with start(**options) as off, start(**options, **lora) as on:
                starts += [{"case": name, "LoRA": key} | start_up(side) for key, side in (("off", off), ("on", on))]
                rows += measure(name, off, on, adapters, args.repeats)
            print(starts[-2:], rows[-len(NUM_ADAPTERS) :], file=sys.stderr, flush=True)
    tables = {"rows": rows, "start": starts}
    show_tables(tables, as_json=False)
    if args.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
