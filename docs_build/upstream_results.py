"""Results of vLLM's own tests by device and vLLM, as ``python -m model_runner_base.testing.upstream`` wrote them.

    python -m docs_build.upstream_results "example device, vLLM 0.16" FILE ...    records results of ``--results``

``docs/upstream.md`` shows them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from model_runner_base.testing.upstream.allow_list import read_list, shipped_list

FILE = Path(__file__).with_suffix(".json")
COUNTS = ("passed", "failed", "expected", "skipped", "not_run")
Results = dict[str, dict[str, dict[str, int]]]
"""Numbers of tests by device with its vLLM, file and result."""


def load() -> Results:
    results: Results = json.loads(FILE.read_text()) if FILE.exists() else {}
    return results


def record(device: str, files: list[Path]) -> None:
    """Writes what a run found, next to what was found before. Files that the release's list does not have are dropped.

    Raises:
        ValueError: the run left out tests of a file, so that its numbers say less than those before.
    """
    results = load()
    of_device = results.get(device, {})
    for file in files:
        for path, found in json.loads(file.read_text()).items():
            if left_out := found.get("left_out"):
                raise ValueError(f"{file}: {left_out} tests of {path} did not run: run it without -k or -x")
            of_device[path] = {name: _number(found[name]) for name in COUNTS}
    listed = read_list(shipped_list(device.rpartition("vLLM ")[2])).files
    results[device] = {path: counts for path, counts in of_device.items() if path in listed}
    FILE.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def _number(found: Any) -> int:
    return found if isinstance(found, int) else len(found)


def cell(counts: dict[str, int] | None) -> str:
    """A cell of the table in docs/upstream.md: one file on one device."""
    if counts is None:
        return "-"
    words = {"failed": "FAILED", "expected": "expected to fail", "skipped": "skipped", "not_run": "not run"}
    parts = [f"{counts['passed']} passed", *(f"{counts[name]} {word}" for name, word in words.items() if counts[name])]
    return ", ".join(parts)


if __name__ == "__main__":
    record(sys.argv[1], [Path(name) for name in sys.argv[2:]])
