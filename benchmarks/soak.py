"""Thousands of random requests through engines that draft: every one has the tokens that it has without drafts.

    python -m benchmarks.soak [--requests 10000] [--drafter ngram eagle ...] [--sync | --async] [--worker CLASS]

Requests come at random to a real engine whose cache is too small for them, so that they are preempted; prompts are cut
into small chunks and share prefixes; an eighth is aborted. A request is greedy or drawn, with penalties, filters, bad
words, stops, grammars, log probabilities or several completions. Its tokens, text, end and log probabilities must be
those of an engine without drafts, with a larger cache and other batches; those of an aborted one as far as it came. At
the end no request, row, block or output may be left behind. The requests are shared out among the cases.

A graph of 1 + k tokens may round another way than one of a single token. Where tokens differ, `distance` says how far
apart the two are in the quantity that sampling maximizes: below 1e-4 it counts as a tie, above as wrong.

A tiny random Llama and, for `eagle`, the bundled model, in float32. `--worker` is the example device by default;
`neuron_runner.worker.NeuronWorker` is openxla.
"""

import json
import os
import sys
import tempfile
import time
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any

# One process, so that the runner can be looked into.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.report import make_parser, show
from model_runner_base.testing.platform_choice import choose_platform

DRAFTERS = {
    "ngram": "ngram",
    "always-right": "same",
    "often-right": "noisy",
    "always-wrong": "wrong",
    "in-parallel": "parallel",
    "untrained-eagle": "head",
    "medusa": "further-heads",
    "eagle": None,
}
"""Drafters by name, with their kind in the kit, on a tiny model; None is the bundled model with its own head."""
ALWAYS_SYNC = ("ngram", "medusa")
DEFAULT = ("ngram", "always-right", "often-right", "eagle")
WORKER, PLATFORM = "examples.plain_device.PlainWorker", "examples.plain_device.PlainPlatform"
TIE = 1e-4
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 40,
    "block_size": 16,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
SMALL_CACHE: dict[str, Any] = {"num_gpu_blocks_override": 20}
"""Engine options of a cache that is too small: six requests need some 30 blocks."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="of all cases together")
    parser.add_argument("--drafter", nargs="+", choices=DRAFTERS, default=DEFAULT)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--sync", dest="ways", action="store_const", const=[False], default=[False, True])
    ways.add_argument("--async", dest="ways", action="store_const", const=[True], help="both if left out")
    parser.add_argument("--worker", default=WORKER)
    parser.add_argument("--platform", help="where no installed plugin of vLLM names it")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--engine-options", type=json.loads, default={}, metavar="JSON", help="as of vllm.LLM")
    parser.add_argument("--first", type=int, default=0, help="the first request's number: others are other requests")
    args = parser.parse_args()
    if args.worker == WORKER or args.platform:
        choose_platform(args.platform or PLATFORM)

    cases = [(name, way) for name, way in product(args.drafter, args.ways) if not (way and name in ALWAYS_SYNC)]
    if not cases:
        parser.error(f"{', '.join(ALWAYS_SYNC)} run under synchronous scheduling only")
    cases.sort(key=lambda case: DRAFTERS[case[0]] is None)  # By target.
    bounds = [args.first + args.requests * index // len(cases) for index in range(len(cases) + 1)]
    numbers = {case: range(*each) for case, each in zip(cases, pairwise(bounds), strict=True)}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        bench = _Bench(Path(directory), args.worker, args.enforce_eager, args.engine_options)
        for _, group in groupby(cases, lambda case: DRAFTERS[case[0]] is None):
            of_model = list(group)
            wanted = bench.without_drafts(of_model[0][0], range(numbers[of_model[0]].start, numbers[of_model[-1]].stop))
            for name, way in of_model:
                rows.append(bench.case(name, way, numbers[name, way], wanted))
                print(json.dumps(rows[-1]), file=sys.stderr)
        bench.close()
    show(rows, args.json)
    if wrong := sum(row["wrong"] for row in rows):
        raise SystemExit(f"{wrong} requests came out wrong")


class _Bench:
    """Engines of a soak, one at a time."""

    def __init__(self, directory: Path, worker: str, enforce_eager: bool, options: dict[str, Any]) -> None:
        # Modules that import vLLM's engine ask for the platform.
        from benchmarks.soak_requests import MAX_LENGTH
        from model_runner_base.testing.engine import Engines
        from model_runner_base.testing.models import make_checkpoint
        from model_runner_base.testing.tokenizer import add_tokenizer

        assert OPTIONS["max_model_len"] == MAX_LENGTH
        self._tiny = add_tokenizer(make_checkpoint("llama", directory))
        self._engines = Engines(worker, enforce_eager, **(OPTIONS | options))

    def _target(self, drafter: str) -> tuple[Any, dict[str, Any]]:
        """Target of a drafter, and the ``speculative_config``."""
        from benchmarks.models import BUNDLED_MODEL
        from model_runner_base.testing.drafts import NUM_DRAFTS, speculation
        from model_runner_base.testing.models import TinyModel

        kind = DRAFTERS[drafter]
        if kind is not None:
            return self._tiny, speculation(kind, self._tiny)
        head = str(BUNDLED_MODEL.with_name("kjv-eagle"))
        return TinyModel(BUNDLED_MODEL), {"model": head, "num_speculative_tokens": NUM_DRAFTS}

    def without_drafts(self, drafter: str, numbers: range) -> dict[int, Any]:
        """Results of the requests on the drafter's target, without drafts."""
        from benchmarks.soak_engine import Soak, Traffic
        from benchmarks.soak_requests import request_of

        target, _ = self._target(drafter)
        llm = self._engines.get(target.path, enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20)
        started = time.perf_counter()
        soak = Soak(llm, request_of, Traffic(most=20, arrivals=0.9))
        results = soak.run(numbers)
        assert soak.counts()["preemptions"] == 0
        print(f"without drafts: {soak.steps} steps, {time.perf_counter() - started:.0f} s", file=sys.stderr)
        return results

    def case(self, drafter: str, is_async: bool, numbers: range, wanted: dict[int, Any]) -> dict[str, Any]:
        from benchmarks.soak_engine import Soak, Traffic
        from benchmarks.soak_requests import request_of

        target, config = self._target(drafter)
        llm = self._engines.get(target.path, speculative_config=config, async_scheduling=is_async, **SMALL_CACHE)
        soak = Soak(llm, request_of, Traffic(most=12, pauses=0.002, aborted=0.15), seed=numbers.start)
        started = time.perf_counter()
        results = soak.run(numbers)
        seconds = time.perf_counter() - started
        soak.check_nothing_left()
        counts = soak.counts()
        ties, wrong = self._compare(target, results, wanted)
        return {
            "drafter": drafter,
            "async": is_async,
            "requests": len(numbers),
            "steps": soak.steps,
            "tokens": soak.tokens,
            "a_step": 1 + counts["accepted"] / max(1, counts["rounds"]),
            "preemptions": int(counts["preemptions"]),
            "aborts": soak.aborts,
            "prefix_hits": int(counts["prefix_hits"]),
            "ties": ties,
            "wrong": wrong,
            "s": round(seconds, 1),
        }

    def _compare(self, model: Any, results: dict[int, Any], wanted: dict[int, Any]) -> tuple[int, int]:
        """Number of requests that differ by a tie, and number of those that differ otherwise."""
        from benchmarks.soak_engine import first_difference
        from benchmarks.soak_requests import child_of, distance, request_of

        ties = wrong = 0
        for number, result in results.items():
            request = request_of(number)
            assert result.is_aborted or len(result.answers) == result.num_completions, f"{number}: {request}"
            for index, got in result.answers.items():
                want = wanted[number].answers[index]
                place = first_difference(got, want, result.is_aborted)
                if place is None:
                    continue
                gap = float("inf")
                if place < min(len(got.tokens), len(want.tokens)) and got.tokens[place] != want.tokens[place]:
                    child = child_of(request, index)
                    gap = distance(model, child, want.tokens[:place], got.tokens[place], want.tokens[place])
                ties += gap < TIE
                wrong += gap >= TIE
                aborted = ", aborted" if result.is_aborted else ""
                print(f"request {number}.{index}{aborted}: {request}\n  token {place}, distance {gap:.2g}")
                print(f"  with drafts    {got}\n  without drafts {want}", flush=True)
        return ties, wrong

    def close(self) -> None:
        self._engines.close()


if __name__ == "__main__":
    main()
