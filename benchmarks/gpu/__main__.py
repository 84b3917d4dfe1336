"""gpu_runner.GPUWorker against vLLM's own GPU worker on this host's GPU: tokens, speed, memory. One call does it all.

    python -m benchmarks.gpu [--json] [--only SECTION,...] [--minutes M] [--ours WORKER] [--stock WORKER]
        [--plot FILE]
    python -m benchmarks.gpu --rehearse

Sections: tokens (the same greedy tokens), memory (size of the KV cache, graph capture), sleep, speed (tokens a second,
host microseconds a step). benchmarks/gpu_hardware.md says how to run it, also without network, and what an H200 showed.
Every engine runs in a process of its own with time limits, so a failure or crash costs its rows and not the call.
``--rehearse`` runs the same code without a GPU, examples/plain_device.py on both sides.

Ends with status 1 if a check failed or a case could not be run, 2 if there is no CUDA device; missed targets are
shown, and do not count as failures.

Columns of tokens: ``differing``, requests with other tokens; ``gap``, nats between vLLM's two likeliest tokens at the
first difference, the widest of all requests; ``allowed``, the gap that passes as a tie (0 in float32, 0.1 in bfloat16).

Rows of memory: ``kv_limit_bytes``, the answer of ``determine_available_memory`` (target: within 5 % of vLLM's);
``kv_bytes``, the blocks that the engine made; ``capture_bytes`` and ``capture_s``, memory and time of graph capture;
``start_s``, seconds to a ready engine.

Columns of speed: tokens a second of both engines, which are on the device at once and take turns; ``host_us``, CPU time
of a step's calls, measured in a run of its own, with the device idle before each call; ``target``, 1.2 where the host
takes over 70 % of vLLM's step, else 1.0; ``met``. "fell back" lists cases that ran in another mode than asked for.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.gpu.cases import (
    FAILED,
    GPU,
    NOT_HERE,
    REHEARSAL,
    Plan,
    Row,
    check_sleep,
    check_tokens,
    compare_memory,
    compare_speed,
    failed,
)
from benchmarks.harness.process import SideError, environment
from benchmarks.harness.report import make_parser, progress, show

SECTIONS = ("tokens", "memory", "sleep", "speed")
PROBE = """
import importlib.metadata as m, json, platform, torch
from importlib.util import find_spec
has = torch.cuda.is_available()
names = ("vllm", "torch", "triton", "transformers", "numpy")
have = {d.metadata["Name"].lower(): d.version for d in reversed(list(m.distributions())) if d.metadata["Name"]}
print(json.dumps({
    "device": torch.cuda.get_device_name() if has else None,
    "device_bytes": torch.cuda.mem_get_info()[1] if has else 0,
    "cuda": torch.version.cuda,
    "python": platform.python_version(),
    **{name: have.get(name) for name in names},
    "kernels": find_spec("vllm._C") is not None,
    "can_sleep": find_spec("vllm.cumem_allocator") is not None,
}))
"""
Case = tuple[str, Callable[[], Iterator[Row]]]


def probe_host() -> dict[str, Any]:
    """Description of the host, from a process of its own: one that asks CUDA holds device memory until it ends."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    if done.returncode:
        raise SideError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def cases_of(section: str, plan: Plan, device_bytes: int) -> list[Case]:
    if section == "tokens":
        return [(case.title, partial(check_tokens, plan, case)) for case in plan.token_cases]
    if section == "speed":
        # Both sides hold weights and cache at once.
        fitting = [model for model in plan.models if plan.platform or 3 * model.kv_bytes < device_bytes]
        plan.notes.extend(f"{model.name}: too large for this device" for model in plan.models if model not in fitting)
        return [(f"{model.name}, {model.graphs}", partial(compare_speed, plan, model)) for model in fitting]
    if section == "memory":
        return [("sizes", partial(compare_memory, plan))]
    return [(f"level {level}", partial(check_sleep, plan, level)) for level in (1, 2)]


def run_case(case: Case, deadline: float) -> list[Row]:
    name, run = case
    if time.monotonic() > deadline:
        return [{"case": name, "status": FAILED, "detail": "not run: out of time (--minutes)"}]
    tqdm.write(f"{name} ...", file=sys.stderr)
    rows: list[Row] = []
    try:
        for row in run():
            rows.append(row)
            if time.monotonic() > deadline:
                return [*rows, {"case": name, "status": FAILED, "detail": "cut short: out of time (--minutes)"}]
    except Exception as error:
        rows.append(failed(name, error))
    return rows


def run_section(section: str, plan: Plan, device_bytes: int, deadline: float) -> list[Row]:
    # Tokens are not timed: as many pairs at once as there are processors for.
    workers = max(1, (os.cpu_count() or 1) // 4) if section == "tokens" else 1
    with ThreadPoolExecutor(min(workers, 4)) as pool:
        cases = cases_of(section, plan, device_bytes)
        done = pool.map(partial(run_case, deadline=deadline), cases)
        return [row for rows in progress(done, section, total=len(cases)) for row in rows]


def tables_of(results: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Tables, each with the same columns in all its rows, without tracebacks."""
    tables = {}
    for section, rows in results.items():
        columns = list(dict.fromkeys(key for row in rows for key in row if key != "error"))
        tables[section] = [{column: row.get(column, "") for column in columns} for row in rows]
    return tables


def draw_speed(path: Path, rows: list[Row]) -> None:
    """Tokens a second relative to vLLM's worker, over the batch."""
    from benchmarks.harness.plots import draw_lines

    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if "ratio" in row:
            lines.setdefault(f"{row['model']}, {row['graphs']}, {row['steps']}", {})[row["batch"]] = row["ratio"]
    draw_lines(path, lines, "batch", "tokens a second, relative to vLLM's worker")


def parse(argv: Sequence[str] | None) -> Any:
    parser = make_parser(__doc__, has_plot=True, has_quick=False)
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="SECTION,...", help=", ".join(SECTIONS))
    parser.add_argument("--minutes", type=float, default=8.5, help="no row is begun after this long")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument("--ours", help="another worker class")
    parser.add_argument("--stock", help="another worker class to compare with")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    deadline = time.monotonic() + args.minutes * 60
    host = probe_host()
    if not args.rehearse and host["device"] is None:
        print(
            f"no CUDA device: torch {host['torch']} (CUDA {host['cuda']}) sees none; --rehearse runs without one",
            file=sys.stderr,
        )
        return 2
    plan = REHEARSAL if args.rehearse else GPU
    plan = replace(
        plan,
        ours=args.ours or plan.ours,
        stock=args.stock or plan.stock,
        can_sleep=host["can_sleep"] and not args.rehearse,
        notes=[] if host["kernels"] or args.rehearse else ["vLLM has no kernels here: native operators, TRITON_ATTN"],
    )
    results = {
        section: run_section(section, plan, host["device_bytes"], deadline)
        for section in SECTIONS
        if section in args.only
    }
    print(", ".join(f"{name} {value}" for name, value in host.items()))
    for section, table in tables_of(results).items():
        print(f"\n{section}")
        show(table, False)
    for note in plan.notes:
        print(f"fell back: {note}")
    rows = [row for section in results.values() for row in section]
    num_failed = sum(row["status"] == FAILED for row in rows)
    num_missed = sum(row.get("met") is False for row in rows)
    num_absent = sum(row["status"] == NOT_HERE for row in rows)
    print(f"{len(rows)} rows: {num_failed} failed, {num_missed} targets missed, {num_absent} not available here")
    if args.plot:
        draw_speed(args.plot, results.get("speed", []))
    if args.json:
        print(json.dumps({"host": host, "rehearsal": args.rehearse, "fell_back": plan.notes, **results}))
    return 1 if num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
