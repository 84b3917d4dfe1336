"""Tokens a second with drafts against without: where speculative decoding pays, by batch and number of drafts.

    python -m benchmarks.speculation [--batches 1 8 32] [--drafts 1 2 3 4 5] [--acceptance 0.8] [--method eagle]

A Llama in float32 on openxla (PJRT CPU): hidden 768, 12 layers (`--layers`), 12 heads of 64 with 4 KV heads, MLP 2048,
vocabulary of 8,192, some 90M parameters. Its weights are random, but such that a drafter of one layer is right at a
known share of the places (benchmarks/draft_pair.py). Prompts of 16 tokens, 96 greedy new ones each, the time of the
short prefill included.

Each batch has one engine without drafts and, one after the other, an engine for each number of drafts, all in processes
of their own, with all cores each while the other is idle; runs with and without take turns. All sizes are compiled
before the first. `draft_model` drafts with a launch a pass, `eagle` with one for all.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.draft_pair import save_drafter, save_target
from benchmarks.models import BUNDLED_MODEL
from benchmarks.report import make_parser, show_tables, take_turns
from benchmarks.throughput import Side

MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
WORKLOAD = {"prompt_tokens": 16, "new_tokens": 96}
MAX_LENGTH = 128
ROUNDS, DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))


def engine(batch: int) -> dict[str, Any]:
    """Engine options of both sides: few sizes, which the batch fits, and one more for when most requests have ended."""
    max_tokens = max(64, batch * WORKLOAD["prompt_tokens"])
    buckets = {
        "num_seqs_buckets": sorted({max(1, batch // 4), batch}),
        "num_batched_tokens_buckets": [max_tokens],
        "context_length_buckets": [MAX_LENGTH],
        "warm_up": "full",
    }
    return {
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": batch,
        "max_num_batched_tokens": max_tokens,
        "disable_log_stats": False,
        "additional_config": {"neuron_config": buckets},
    }


def measure(batch: int, num_drafts: int, without: Side, drafting: Side, repeats: int) -> dict[str, Any]:
    """Rows of runs in turns; the ratio is the median of the pairs'."""
    answers: dict[str, dict[str, float]] = {}

    def run(name: str, side: Side) -> None:
        answers[name] = side.run(batch=batch, **WORKLOAD)

    before = drafting.run(batch=batch, **WORKLOAD)
    times = take_turns({"without": partial(run, "without", without), "with": partial(run, "with", drafting)}, repeats)
    rounds, drafted, accepted = (answers["with"][name] - before[name] for name in (ROUNDS, DRAFTED, ACCEPTED))
    tokens = 1e3 * batch * WORKLOAD["new_tokens"]
    return {
        "batch": batch,
        "drafts": num_drafts,
        "accepted": accepted / drafted,
        "a_step": 1 + accepted / rounds,
        "without_tok_s": tokens / median(times["without"]),
        "with_tok_s": tokens / median(times["with"]),
        "ratio": median(one / other for one, other in zip(times["without"], times["with"], strict=True)),
    }


def by_batch(rows: list[dict[str, Any]], drafts: list[int]) -> list[dict[str, Any]]:
    """Lines of the ratios, one for each batch."""
    ratios = {(row["batch"], row["drafts"]): row["ratio"] for row in rows}
    batches = dict.fromkeys(row["batch"] for row in rows)
    return [{"with / without": f"batch {b}"} | {f"{k} drafts": ratios[b, k] for k in drafts} for b in batches]


def verdict(rows: list[dict[str, Any]]) -> str:
    """Batches and numbers of drafts with which speculation pays."""
    lines = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        of_batch = [row for row in rows if row["batch"] == batch]
        best = max(of_batch, key=lambda row: row["ratio"])
        paying = [str(row["drafts"]) for row in of_batch if row["ratio"] > 1]
        pays = f"pays with {', '.join(paying)} drafts" if paying else "does not pay"
        lines.append(f"batch {batch}: {pays}; best with {best['drafts']}, {best['ratio']:.2f} times as fast as without")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--acceptance", type=float, default=0.8, help="share of the places at which the drafter is right"
    )
    parser.add_argument("--method", choices=["eagle", "draft_model"], default="eagle")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    root = str(BUNDLED_MODEL.parents[2])
    start = partial(Side, sys.executable, {**os.environ, "PYTHONPATH": root, "VLLM_NEURON_RUNNER": "1"})
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "target"
        save_target(target, num_hidden_layers=args.layers, **MODEL)
        drafter = save_drafter(target, Path(directory) / "drafter", args.method, args.acceptance)
        for batch in args.batches:
            options = engine(batch) | {"model": str(target), "async_scheduling": True}
            with start(**options) as without:
                for num_drafts in args.drafts:
                    config = drafter | {"num_speculative_tokens": num_drafts}
                    with start(**options, speculative_config=config) as drafting:
                        rows.append(measure(batch, num_drafts, without, drafting, args.repeats))
                    print(rows[-1], file=sys.stderr, flush=True)
    tables = {"rows": rows, "ratios": by_batch(rows, args.drafts)}
    show_tables(tables, as_json=False)
    print(verdict(rows))
    if args.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
