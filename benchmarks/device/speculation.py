"""Tokens a second with drafts against without: where speculative decoding pays, by batch and number of drafts.

    python -m benchmarks.device.speculation [--batches 1 8 32] [--drafts 1 2 3 4 5] [--acceptance 0.8]
        [--plot FILE]

A Llama in float32 on openxla (PJRT CPU): hidden 768, 12 layers (`--layers`), 12 heads of 64 with 4 KV heads, MLP 2048,
vocabulary of 8,192, some 90M parameters. Its weights are random, but such that a drafter of one layer is right at a
known share of the places (draft_pair.py). Prompts of 16 tokens, 96 greedy new ones each, the time of the short prefill
included.

Each batch has one engine without drafts and, one after the other, an engine for each number of drafts; runs with and
without take turns. All sizes are compiled before the first. The drafter is an EAGLE head.
"""

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.device.draft_pair import save_drafter, save_target
from benchmarks.device.engines import Engine, sized
from benchmarks.harness.report import make_parser, progress, show, take_turns
from model_runner_base.testing.engine import metric

MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
WORKLOAD: dict[str, Any] = {"prompt_tokens": 16, "new_tokens": 96}
MAX_LENGTH = 128
ROUNDS, DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))


def measure(batch: int, num_drafts: int, without: Engine, drafting: Engine, repeats: int) -> dict[str, Any]:
    """Rows of runs in turns; the ratio is the median of the pairs'."""
    runs = {
        "without": partial(without.run, batch=batch, **WORKLOAD),
        "with": partial(drafting.run, batch=batch, **WORKLOAD),
    }
    times = take_turns(runs, repeats)
    rounds, drafted, accepted = (metric(drafting.llm, name) for name in (ROUNDS, DRAFTED, ACCEPTED))
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


def main() -> None:
    parser = make_parser(__doc__, repeats=5, has_plot=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--acceptance", type=float, default=0.8, help="share of the places at which the drafter is right"
    )
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    if args.quick:
        args.batches, args.drafts, args.layers, args.repeats = [1], [2], 1, 1

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "target"
        save_target(target, num_hidden_layers=args.layers, **MODEL)
        drafter = save_drafter(target, Path(directory) / "drafter", args.acceptance)
        bar = progress((), "batches and drafts", total=len(args.batches) * len(args.drafts))
        for batch in args.batches:
            # Few sizes, which the batch fits, and one more for when most requests have ended.
            options = sized(batch, MAX_LENGTH, WORKLOAD["prompt_tokens"], sorted({max(1, batch // 4), batch}))
            options |= {"model": str(target), "async_scheduling": True, "disable_log_stats": False}
            without = Engine(**options)
            for num_drafts in args.drafts:
                drafting = Engine(**options, speculative_config=drafter | {"num_speculative_tokens": num_drafts})
                rows.append(measure(batch, num_drafts, without, drafting, args.repeats))
                del drafting
                bar.update()
            del without
        bar.close()
    show(rows, args.json)
    if args.plot:
        from benchmarks.harness.plots import draw_lines

        ratios = {(row["batch"], row["drafts"]): row["ratio"] for row in rows}
        lines = {f"batch {b}": {k: ratios[b, k] for k in args.drafts} for b in args.batches}
        draw_lines(args.plot, lines, "drafts", "tokens a second, with drafts / without")


if __name__ == "__main__":
    main()
