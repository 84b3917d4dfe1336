"""Results of vLLM's own tests by device and vLLM, as ``python -m model_runner_base.testing.upstream`` wrote them.

    python -m docs_build.upstream_results "example device, vLLM 0.16" FILE ...    records results of ``--results``

``docs/upstream.md`` shows them.
"""

import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
COUNTS = ("passed", "failed", "expected", "skipped", "not_run")
Results = dict[str, dict[str, dict[str, int]]]
"""Numbers of tests by device with its vLLM, file and result."""


def load() -> Results:
    results: Results = json.loads(FILE.read_text()) if FILE.exists() else {}
    return results


def record(device: str, files: list[Path]) -> None:
    """Writes what a run found, next to what was found before."""
    results = load()
    for file in files:
        for path, found in json.loads(file.read_text()).items():
            results.setdefault(device, {})[path] = {name: _number(found[name]) for name in COUNTS}
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
