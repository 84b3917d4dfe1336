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
from turns import due_of

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
# ten seconds and more, and one engine of each feature, of which a third runs at a commit. The example device has others
# on that release, and the newest one has all on the example device.
OF_TEXT = ["start", "equality.py and (llama or limits)", "device_operations", "repeated_numbers", "noise"]
OF_TEXT += ["sampling.py", "combinations", "seeds.py", "logprobs.py", "logits_processors", "hostile_requests"]
OF_TEXT += ["structured_outputs.py and not guidance", "distribution_under_penalties", "interfaces", "padding_of_nan"]
OF_FEATURES = [
    "speculation.py and prompt-lookup and not arrivals",
    "speculation.py and often-right-synchronous and not arrivals",
    "speculation.py and [eagle] and not arrivals",
    "recurrent.py and qwen3-next and not drafts",
    "multimodal.py and qwen3-vl",
    "cache_formats.py and (latents or eight_bits)",
    "attention.py and (large-scores or high_block_ids)",
    "attention_memory",
    "lora.py",
    "pooling.py and ([qwen3] or vectors or preemption)",
    "sleep.py and 1-alone",
    "quantized.py and MXFP4",
]
TEXT_COMPILED = [f"test_{each}" for each in OF_TEXT]
FEATURES_COMPILED = [f"test_{each}" for each in OF_FEATURES]
COMPILED = " or ".join([*TEXT_COMPILED, *FEATURES_COMPILED])
COMPILED_NOW = " or ".join([*TEXT_COMPILED, *due_of(FEATURES_COMPILED, 3)])
# Cases of the example device of which a third runs at a commit, on either release, those that take longest.
IN_TURNS = [
    "test_speculation.py and eagle",
    "test_speculation.py and draft-",
    "test_speculation.py and not (eagle or draft-)",
    "test_random_schedules and gemma3",
    "test_random_schedules and chunks",
    "test_random_schedules and not (gemma3 or chunks)",
    "test_ranks.py",
    "test_replicas.py",
    "test_server.py",
    "test_stages.py and asynchronous",
    "test_stages.py and not asynchronous",
    "test_distributions.py and not under_penalties",
    "test_state_schedules.py or test_soak.py",
    "test_recurrent.py or test_draft_gaps.py",
    "test_multimodal.py or test_mixed_prompts.py",
    "test_sleep.py or test_reload.py",
    "test_unequal_heads.py or test_attention",
    "test_preemption.py or test_later_parameters.py",
    "test_equality.py and not (llama or limits)",
    "test_transcription.py or test_half_precision.py or test_quantized.py",
]
NOT_NOW = [each for each in IN_TURNS if each not in due_of(IN_TURNS, 3)]
# These steps choose among several sizes. Schedules with chunked attention, and with windows in some layers, take two
# minutes with graphs; tests/base compares both architectures on openxla with transformers. A third runs at a commit.
OF_SIZES = "(test_compilation or test_schedules or test_scheduled_writes)"
SIZES_COMPILED = [
    "test_compilation",
    "test_scheduled_writes or test_random_schedules and llama",
    "test_schedules.py and not (llama or gemma3 or chunks)",
]
SIZES_COMPILED_NOW = due_of(SIZES_COMPILED, 3)


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


def assert_all_pass(status: int | None, results: dict[str, str], printed: str, *refused: str, fewest: int = 41) -> None:
    """Asserts that the table has ``fewest`` promises or more, that all are kept, and that none is refused but those
    that begin as ``refused`` do."""
    assert status == 0, printed[-8000:]
    assert len(results) >= fewest, printed[-8000:]
    not_kept = {promise for promise, result in results.items() if not result.startswith("passes")}
    assert {promise for promise in not_kept if not promise.startswith(refused)} == set()
