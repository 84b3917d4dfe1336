"""Seconds of a served model by part of its steps, from a trace of torch's profiler."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PARTS = {
    "attention": ("model_runner_base/attention/",),
    "linear layers": ("layers/linear.py",),
    "logits": ("layers/logits_processor.py",),
    "norms, activations, positions": (
        "layers/layernorm.py",
        "layers/activation.py",
        "layers/rotary_embedding/",
        "layers/vocab_parallel_embedding.py",
    ),
    "sampling": ("model_runner_base/heads/",),
    "rest of the model": ("vllm/model_executor/", "model_runner_base/runner/model_graph.py"),
    "rest of the step": ("model_runner_base/",),
}
"""Parts of a step, and parts of the paths of the files that belong to them. The first part that fits a function has it,
with all that it calls and that fits no other."""
WHOLE = ("attention", "linear layers", "logits", "norms, activations, positions")
"""Parts that also have all that their functions call."""
WAITS = "between steps"


def trace_options(folder: Path) -> list[str]:
    """Options of ``vllm serve`` for a profiler whose trace names the functions that call each operator."""
    config = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": True}
    return ["--profiler-config", json.dumps(config)]


def seconds_of_parts(folder: Path) -> dict[str, float]:
    """Seconds of each part, and of those between steps, in the workers' traces that a profiler has written."""
    seconds = dict.fromkeys([*PARTS, WAITS], 0.0)
    for file in folder.glob("*rank*.json*"):  # The API server writes one, too.
        opener: Any = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt") as opened:
            events = json.load(opened)["traceEvents"]
        calls = [event for event in events if event.get("cat") in ("python_function", "cpu_op") and event.get("dur")]
        threads = {event["tid"] for event in calls if part_of(event["name"])}
        for thread in threads:
            add_own_time(seconds, [event for event in calls if event["tid"] == thread])
    return seconds


def add_own_time(seconds: dict[str, float], calls: Iterable[dict[str, Any]]) -> None:
    """Adds the time of each call of one thread, without that of the calls in it, to the part that it belongs to."""
    open_calls: list[tuple[float, str]] = []  # When each ends, and its part.
    last = None

    def advance(time: float) -> None:
        nonlocal last
        if last is not None:
            seconds[open_calls[-1][1] if open_calls else WAITS] += max(0.0, time - last) / 1e6
        last = time

    for call in sorted(calls, key=lambda call: (call["ts"], -call["dur"])):
        while open_calls and open_calls[-1][0] <= call["ts"]:
            advance(open_calls[-1][0])
            open_calls.pop()
        advance(call["ts"])
        around = open_calls[-1][1] if open_calls else WAITS
        part = around if around in WHOLE else part_of(call["name"]) or around
        open_calls.append((call["ts"] + call["dur"], part))
    while open_calls:
        advance(open_calls[-1][0])
        open_calls.pop()


def part_of(name: str) -> str | None:
    """Part that a function belongs to by its own file; None if it belongs to that of its caller."""
    for part, files in PARTS.items():
        if any(file in name for file in files):
            return part
    return None
