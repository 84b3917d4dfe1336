"""Tokens a second of a whole server on a device that takes no time: vLLM's scheduler and runner, or ours.

    python -m benchmarks.serve [--quick] [--json] [--concurrency N ...] [--api-servers N ...] [--stream-interval N ...]

The server is ``vllm serve``, and the client that of ``vllm bench serve``: random prompts, streamed, so many at once
as ``--concurrency`` says and twice as many in all, after one run that does not count. Between tokens means between two
pieces of a stream, which have as many tokens as the stream interval says. Below the rates is how busy each process was,
as CPU seconds a second: an API server (the busiest, if there are several), the engine core, and the client. On a
machine with fewer cores than processes they take time from each other, and a process may bind below 1.
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from vllm.benchmarks import serve

from benchmarks.harness.models import random_llama
from benchmarks.harness.process import environment
from benchmarks.harness.report import NARROWEST, make_parser, progress, show_row
from benchmarks.harness.servers import free_port, processes_of, served
from model_runner_base.testing.tokenizer import make_tokenizer

SCHEDULERS = {
    "stock": "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    "ours": "model_runner_base.scheduling.make_scheduler",
}
WORKERS = {"stock": "StockWorker", "ours": "OurWorker"}
START_S = 300


@contextlib.contextmanager
def server(
    model: Path, side: str, num_servers: int, interval: int, max_num_seqs: int
) -> Iterator[tuple[int, psutil.Process]]:
    """A server's port and process, once it answers."""
    port = free_port()
    options = {
        "host": "127.0.0.1",
        "port": port,
        "worker-cls": f"benchmarks.serve.workers.{WORKERS[side]}",
        "scheduler-cls": SCHEDULERS[side],
        "max-model-len": 4096,
        "max-num-seqs": max_num_seqs,
        "max-num-batched-tokens": 4096,
        "block-size": 16,
        "api-server-count": num_servers,
        "stream-interval": interval,
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.serve.server",
        str(model),
        "--async-scheduling",
        "--disable-cascade-attn",
    ]
    command += [f"--{name}={value}" for name, value in options.items()]
    # vLLM's second model runner, which newer releases choose for some models, is not what is measured.
    chosen = environment() | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    with served(command, port, chosen, START_S) as (process, _):
        yield port, process


def busy_s(process: psutil.Process) -> dict[str, float]:
    """CPU seconds so far of the engine core, and of each API server by its process id.

    The process that was started is itself the API server if it is the only one.
    """
    seconds = {}
    for each in processes_of(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            times, title = each.cpu_times(), " ".join(each.cmdline())
            seconds["engine" if "EngineCore" in title else f"api {each.pid}"] = times.user + times.system
    return seconds


async def timed(*args: Any, **options: Any) -> dict[str, Any]:
    """Result of vLLM's ``benchmark``, which sends the requests, with the CPU seconds of this process."""
    start = time.process_time()
    result = await benchmark(*args, **options)
    return result | {"client_s": time.process_time() - start}


benchmark, serve.benchmark = serve.benchmark, timed


def load(model: Path, port: int, concurrency: int, num_requests: int, length: int) -> dict[str, Any]:
    """Results of vLLM's client; what it prints is dropped."""
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dataset-name": "random",
        "random-input-len": length,
        "random-output-len": length,
        "num-prompts": num_requests,
        "max-concurrency": concurrency,
        "percentile-metrics": "itl",
        "metric-percentiles": "50,99",
        "temperature": 0,
    }
    args = parser.parse_args(
        ["--ignore-eos", "--disable-tqdm", "--save-detailed", *(f"--{name}={value}" for name, value in options.items())]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return asyncio.run(serve.main_async(args))


def measure(
    model: Path, port: int, process: psutil.Process, concurrency: int, num_requests: int, length: int
) -> dict[str, Any]:
    """One row of the table, but for what the server was started with."""
    load(model, port, concurrency, num_requests, length)
    before = busy_s(process)
    result = load(model, port, concurrency, num_requests, length)
    after = busy_s(process)
    if result["completed"] != num_requests:
        error = next(filter(None, result["errors"]), "no error was told")
        raise RuntimeError(f"{num_requests - result['completed']} of {num_requests} requests failed: {error}")
    wall_s = result["duration"]
    busy = {name: (seconds - before.get(name, 0)) / wall_s for name, seconds in after.items()}
    shares = {
        "api_server": max(share for name, share in busy.items() if name != "engine"),
        "engine_core": busy["engine"],
        "client": result["client_s"] / wall_s,
    }
    return {
        "tokens_per_s": round(result["output_throughput"]),
        "itl_p50_ms": round(result["p50_itl_ms"], 2),
        "itl_p99_ms": round(result["p99_itl_ms"], 2),
        **{name: round(share, 2) for name, share in shares.items()},
        "busiest": max(shares, key=lambda name: shares[name]),
    }


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--sides", nargs="+", choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[256, 1024], help="requests at once")
    parser.add_argument("--requests", type=int, help="requests of a run; twice the concurrency if left out")
    parser.add_argument("--api-servers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--stream-interval", nargs="+", type=int, default=[1], help="tokens of a piece of a stream")
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt, and of an output")
    args = parser.parse_args()
    if args.quick:
        args.concurrency, args.requests, args.api_servers, args.length = [4], 8, [1], 16
    return args


def main() -> None:
    args = arguments()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    rows = []
    cases = list(itertools.product(args.stream_interval, args.api_servers, args.sides))
    with random_llama(num_layers=1) as model:
        make_tokenizer().save_pretrained(model)
        for interval, num_servers, side in progress(cases, "servers"):
            started = {"side": side, "api_servers": num_servers, "stream_interval": interval}
            with server(model, side, num_servers, interval, max(args.concurrency)) as (port, process):
                for concurrency in args.concurrency:
                    num_requests = args.requests or 2 * concurrency
                    figures = measure(model, port, process, concurrency, num_requests, args.length)
                    rows.append(started | {"requests": concurrency, **figures})
                    show_row(rows[-1], NARROWEST, has_header=len(rows) == 1)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
