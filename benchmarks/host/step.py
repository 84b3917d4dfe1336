"""Host time a step of an engine core: vLLM's own scheduler and runner against ours, in one process.

    python -m benchmarks.host.step [--stock first|second] [--cases NAME ...] [--steps N] [--turn N] [--plot FILE]

vLLM's second runner, the default where vLLM has it, or its first, which older releases have alone.

Time is the thread's CPU time in ``schedule``, in the runner (execute_model, sample_tokens and, under asynchronous
scheduling, get_output, less what the model, the logits and the sampler take, which are fakes of
harness/fake_device.py), and in ``update_from_output``. Prefix caching and statistics are on, as by default. The two
take turns of 64 steps, after eight that do not count, stepped as in an engine: on a device that is not the host nothing
else runs in between (in the mixed cases prompts are drawn, too). With ``--turn 1`` each finds in the processor's caches
what the other has just left there. Packed buffers are made beforehand, as an engine's warm-up does. Figures are means
over all steps, since steps differ: now and then a request enters a new block or attention tile, or all move to a larger
size. A step that takes either ten times its median is left out for both. The garbage collector rests while steps are
timed.

Before a case is timed, and in schedules of random arrivals with chunked prompts, preemption and finishing, both
schedulers must ask for the same steps, and both runners hand over the same token ids, positions, cache slots, visible
keys and sampled places for each request (``StepTrace``), and return the same tokens.

What favours vLLM's runners: see stock_runner.py and second_runner.py.
"""

import argparse
import json

from vllm.config import VllmConfig

from benchmarks.harness.report import make_parser, progress, show_row
from benchmarks.harness.runners import init_process
from benchmarks.host.cases import CASES
from benchmarks.host.race import Sides, check_random, measure


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, has_plot=True)
    parser.add_argument("--cases", nargs="+", metavar="NAME", choices=CASES, help="; ".join(CASES))
    parser.add_argument("--steps", type=int, default=512, help="timed steps a case")
    parser.add_argument("--turn", type=int, default=64, help="counted steps of a runner before it is the other's turn")
    stocks = ["second", "first"] if hasattr(VllmConfig, "use_v2_model_runner") else ["first"]
    parser.add_argument("--stock", choices=stocks, default=stocks[0], help="which of vLLM's runners is raced")
    args = parser.parse_args()
    if args.quick:
        args.cases, args.steps = args.cases or ["decode_8"], 4
    # The fake sampler leaves out launches and copies, of which sampling with features takes most.
    fit = [name for name, case in CASES.items() if args.stock == "first" or not case.has_features]
    if args.cases and (unfit := [name for name in args.cases if name not in fit]):
        parser.error(f"{', '.join(unfit)}: cases with features need --stock first")
    args.cases = args.cases or fit
    return args


def main() -> None:
    args = arguments()
    init_process()
    results: dict[str, dict[str, float]] = {}
    chosen = {name: CASES[name] for name in args.cases}
    with progress((), f"checks that ours and vLLM's {args.stock} runner do the same", total=len(chosen)) as bar:
        for is_async in sorted({case.is_async for case in chosen.values()}):
            cases = {name: case for name, case in chosen.items() if case.is_async == is_async}
            sides = Sides(is_async, args.stock == "second")
            for has_features in sorted({case.has_features for case in cases.values()}):
                check_random(sides, has_features, 24 if args.quick else 80)
            for name, case in cases.items():
                bar.set_description(name)
                results[name] = measure(sides, case, args.steps, args.turn)
                row = _row(name, results[name], has_targets=args.stock == "first")
                show_row(row, max(map(len, CASES)), has_header=len(results) == 1)
                bar.update()
    if args.plot:
        from benchmarks.harness.plots import draw_bars

        ratios = {name: values["sum_ratio"] for name, values in results.items()}
        draw_bars(args.plot, ratios, "CPU time of scheduler and runner, vLLM's / this base's")
    if args.json:
        # The runner alone has had these names from before the scheduler was timed.
        for values in results.values():
            values |= {"stock_us": values["stock_runner_us"], "ours_us": values["ours_runner_us"]}
            values["ratio"] = values["runner_ratio"]
        print(json.dumps({"cases": results}))


def _row(name: str, values: dict[str, float], has_targets: bool) -> dict[str, object]:
    case = CASES[name]
    targets = {"runner_target": case.target, "sum_target": case.sum_target or ""} if has_targets else {}
    return {"case": name, **{key.removesuffix("_us"): value for key, value in values.items()}, **targets}


if __name__ == "__main__":
    main()
