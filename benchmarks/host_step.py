"""Host time a step of an engine core: vLLM's own scheduler and runner against ours, in one process.

    python -m benchmarks.host_step [--json] [--cases NAME ...] [--steps N] [--turn N] [--cold] [--profile]

Time is the thread's CPU time in ``schedule``, in the runner (execute_model, sample_tokens and, under asynchronous
scheduling, get_output, less what the model, the logits and the sampler take, which are fakes: fake_device.py), and in
``update_from_output``. Prefix caching and statistics are on, as by default. The two take turns of 64 steps, after
eight that do not count, stepped as in an engine: on a device that is not the host nothing else runs in between (in the
mixed cases prompts are drawn, too). With ``--turn 1`` each finds in the processor's caches what the other has just left
there. Packed buffers are made beforehand, as an engine's warm-up does. Figures are means over all steps, since steps
differ: now and then a request enters a new block or attention tile, or all move to a larger size. A step that takes
either ten times its median is left out for both. The garbage collector rests while steps are timed.

Before a case is timed, and in schedules of random arrivals with chunked prompts, preemption and finishing, both
schedulers must ask for the same steps, and both runners hand over the same token ids, positions, cache slots, visible
keys and sampled places for each request (``StepTrace``), and return the same tokens.

What favours the stock runner: see stock_runner.py.
"""

import argparse
import cProfile
import json
import os
import pstats

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.host_cases import CASES
from benchmarks.report import make_parser, show
from model_runner_base.testing.platform_choice import choose_platform


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", metavar="NAME", choices=CASES, help="; ".join(CASES))
    parser.add_argument("--steps", type=int, default=512, help="timed steps a case")
    parser.add_argument("--turn", type=int, default=64, help="counted steps of a runner before it is the other's turn")
    parser.add_argument("--cold", action="store_true", help="sweep the processor's caches before each step")
    parser.add_argument("--profile", action="store_true", help="show where our time goes (which the profiler changes)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    choose_platform("examples.plain_device.PlainPlatform")
    # Modules that import vLLM's engine ask for the platform.
    from benchmarks.host_drive import check_random, measure
    from benchmarks.host_engine import Sides, init_process

    init_process()
    results: dict[str, dict[str, float]] = {}
    for is_async in (False, True):
        cases = {name: CASES[name] for name in args.cases or CASES if CASES[name].is_async == is_async}
        if not cases:
            continue
        sides = Sides(is_async)
        for has_features in sorted({case.has_features for case in cases.values()}):
            check_random(sides, has_features)
        for name, case in cases.items():
            profiler = cProfile.Profile() if args.profile else None
            results[name] = measure(sides, case, args.steps, args.turn, args.cold, profiler)
            if profiler is not None:
                print(f"\n{name}, {args.steps} steps")
                pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    show([_row(name, values) for name, values in results.items()], False)
    if args.json:
        # The runner alone has had these names from before the scheduler was timed.
        for values in results.values():
            values |= {"stock_us": values["stock_runner_us"], "ours_us": values["ours_runner_us"]}
            values["ratio"] = values["runner_ratio"]
        print(json.dumps({"cases": results}))


def _row(name: str, values: dict[str, float]) -> dict[str, object]:
    case = CASES[name]
    targets = {"runner_target": case.target, "sum_target": case.sum_target or ""}
    return {"case": name, **{key.removesuffix("_us"): value for key, value in values.items()}, **targets}


if __name__ == "__main__":
    main()
