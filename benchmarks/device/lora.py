"""Cost of LoRA adapters in a step: with ``enable_lora`` and 0, 1 and 4 of them in a batch, against LoRA off.

    python -m benchmarks.device.lora [--cases decode-1 decode-8 decode-32 prefill-256] [--rank 16] [--slots 4]

A Llama in float32 on openxla (PJRT CPU) with random weights: hidden 1,024, 2 layers (`--layers`), 16 heads of 64 with 4
KV heads, MLP 2,816, vocabulary of 8,192, some 40M parameters. Adapters are of all linear layers of attention and MLP.
Decode is 16 tokens a prompt and 48 new ones, counted with the time of that short prefill; prefill is one prompt of 256
tokens and one new token. Each case has two engines, LoRA off and LoRA on. All runs take turns; ratios are the median of
the turns'. What the engine without LoRA saves where no adapter is in use is what a second family of graphs would save.
"""

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.device.engines import Engine, sized
from benchmarks.harness.models import MIDDLING, saved_llama
from benchmarks.harness.report import make_parser, progress, show, take_turns
from model_runner_base.testing.adapters import make_adapter

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_ADAPTERS = (0, 1, 4)
CASES: dict[str, dict[str, Any]] = {
    **{f"decode-{batch}": {"batch": batch, "prompt_tokens": 16, "new_tokens": 48} for batch in (1, 8, 32)},
    "prefill-256": {"batch": 1, "prompt_tokens": 256, "new_tokens": 1},
}


def measure(name: str, off: Engine, on: Engine, adapters: list[str], repeats: int) -> list[dict[str, Any]]:
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


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rank", type=int, default=16, help="of the adapters and of the slots")
    parser.add_argument("--slots", type=int, default=4, help="max_loras")
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    if args.quick:
        args.cases, args.layers, args.repeats = ["decode-1"], 1, 1

    lora = {"enable_lora": True, "max_loras": args.slots, "max_lora_rank": args.rank}
    rows: list[dict[str, Any]] = []
    with saved_llama(num_hidden_layers=args.layers, **MIDDLING) as model, tempfile.TemporaryDirectory() as directory:
        adapters = [
            str(make_adapter(model, Path(directory), number, rank=args.rank, targets=TARGETS).path)
            for number in range(1, 1 + max(NUM_ADAPTERS))
        ]
        for name in progress(args.cases, "cases"):
            batch, prompt_tokens, new_tokens = CASES[name].values()
            length = 64 * -(-(prompt_tokens + new_tokens) // 64)
            options = sized(batch, length, prompt_tokens, [batch]) | {"model": str(model)}
            sides = {"off": Engine(**options), "on": Engine(**options, **lora)}
            rows += measure(name, sides["off"], sides["on"], adapters, args.repeats)
            del sides
    show(rows, args.json)


if __name__ == "__main__":
    main()
