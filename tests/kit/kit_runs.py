"""Runs of the kit's command on a whole device, and the rows of the table that each prints."""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from counts import IS_FULL
from forks import ROOT, run_kit

from docs_build import kit_results

PLAIN = ["examples.plain_device.PlainWorker", "--platform", "examples.plain_device.PlainPlatform"]
# Of the schedules, enough for every size and for donated caches; a deliberate fault has 15 of each architecture to be
# caught by.
FEWER_SCHEDULES = [] if IS_FULL else ["--schedules", "4"]
FEWEST_SCHEDULES = [] if IS_FULL else ["--schedules", "3"]
# tests/base/test_sampling.py draws 20,000 tokens of each distribution on the sampler alone.
FEWER_DRAWS = [] if IS_FULL else ["--draws", "500"]
FEWER = [*FEWER_SCHEDULES, *FEWER_DRAWS]

# Cases of the release with torch_xla that run with openxla's graphs: all that share the text engine, whose start takes
# ten seconds and more, and one engine of each feature. The example device has others on that release, and the newest
# one has all on the example device.
OF_TEXT = ["start", "equality.py and (llama or limits)", "device_operations", "repeated_numbers", "noise"]
OF_TEXT += ["sampling.py", "combinations", "seeds.py", "logprobs.py", "logits_processors", "hostile_requests"]
OF_TEXT += ["structured_outputs.py and not guidance", "distribution_under_penalties", "interfaces", "padding_of_nan"]
OF_FEATURES = [
    "attention.py and (large-scores or high_block_ids)",
    "attention_memory",
    "cache_formats.py and (latents or eight_bits)",
    "lora.py",
    "multimodal.py and qwen3-vl",
    "pooling.py and ([qwen3] or vectors or preemption)",
    "quantized.py and MXFP4",
    "recurrent.py and qwen3-next and not drafts",
    "sleep.py and 1-alone",
    "speculation.py and (prompt-lookup or often-right-synchronous or [eagle]) and not arrivals",
]
CHOSEN = [f"test_{each}" for each in [*OF_TEXT, *OF_FEATURES]]
COMPILED = " or ".join(CHOSEN)
# These steps choose among several sizes. Schedules with chunked attention, and with windows in some layers, take two
# minutes with graphs; tests/base compares both architectures on openxla with transformers.
OF_SIZES = "(test_compilation or test_schedules or test_scheduled_writes)"
SIZES_COMPILED = f"{OF_SIZES} and not (test_random_schedules and (gemma3 or chunks))"


def results_of(printed: str) -> dict[str, str]:
    """Results by promise."""
    row = r"^  \w[\w ]*? {2,}(\S.*?) {2,}((?:passes|FAILS|not supported).*?)(?: {2,}|$)"
    return dict(re.findall(row, printed, re.M))


def run_forked(arguments: list[str], path: Path = ROOT) -> tuple[int | None, dict[str, str], str]:
    """Runs the kit as ``run`` does, for a device that vLLM does not find as a platform by itself."""
    status, printed = run_kit(arguments, path, COLUMNS="300")
    return status, results_of(printed), printed


def run(arguments: list[str], path: Path = ROOT) -> tuple[int | None, dict[str, str], str]:
    """Runs the kit; returns the exit status, results by promise, and everything printed."""
    out = subprocess.run(
        [sys.executable, "-m", "model_runner_base.testing", *arguments],
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "COLUMNS": "300"},
        cwd=path,
        capture_output=True,
        text=True,
    )
    return out.returncode, results_of(out.stdout), out.stdout + out.stderr


def collected(expression: str) -> set[str]:
    """Cases, by file and name, that the kit runs with pytest's ``-k``."""
    _, _, printed = run_forked([*PLAIN, "--collect-only", "-v", "-k", expression])
    cases, file = set(), ""
    for kind, name in re.findall(r"<(Module|Function) (.*)>", printed):
        if kind == "Module":
            file = name
        else:
            cases.add(f"{file}::{name}")
    return cases


def measure(device: str, arguments: list[str], is_recorded: bool) -> tuple[int | None, dict[str, str], str]:
    """Runs the kit as ``run`` does, and compares with what was measured before; or records it."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "results.json"
        status, results, printed = run([*arguments, "--results", str(file)])
        rows = json.loads(file.read_text()) if file.exists() else []
    device = f"{device}, vLLM {'.'.join(version('vllm').split('.')[:2])}"
    if is_recorded:
        kit_results.record(device, rows)
    broken = kit_results.broken(device, rows)
    assert broken == [], printed[-8000:]
    return status, results, printed


def assert_all_pass(status: int | None, results: dict[str, str], printed: str, *refused: str) -> None:
    """Asserts that each promise of the table is kept, and none refused but those that begin as ``refused`` do."""
    assert status == 0, printed[-8000:]
    assert len(results) > 40, printed[-8000:]
    not_kept = {promise for promise, result in results.items() if not result.startswith("passes")}
    assert {promise for promise in not_kept if not promise.startswith(refused)} == set()
