"""Results of the conformance kit by device and vLLM, as the tests measured them.

    python3.11 dev.py test --record tests/kit                  measure them
    python3.11 dev.py --lane newest test --record tests/kit    the same on the newest vLLM

Without ``--record`` the same tests compare: a promise that was kept and is not any more fails them. ``docs/support.md``
shows the results.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import gettempdir

from filelock import FileLock

FILE = Path(__file__).with_suffix(".json")
Results = dict[str, dict[str, dict[str, str]]]
"""Results by device with its vLLM, group and promise: "passes", or the device's words if it refuses."""


def load(file: Path = FILE) -> Results:
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    return results


def broken(device: str, rows: Iterable[Mapping[str, str]], file: Path = FILE) -> list[str]:
    """Promises that ``device`` kept when they were measured, and that these rows of the kit's table do not show as
    kept. A row that was not run says nothing."""
    measured = load(file).get(device, {})
    return [
        f"{row['group']}: {row['promise']}: {row['result']}: {row['reason']}"
        for row in rows
        if measured.get(row["group"], {}).get(row["promise"]) == "passes" and not row["result"].startswith("passes")
    ]


def record(device: str, rows: Iterable[Mapping[str, str]], file: Path = FILE) -> None:
    """Writes what rows of the kit's table show, next to what was measured before. A failure is not written."""
    with FileLock(Path(gettempdir()) / "kit_results.lock"):
        results = load(file)
        groups = results.setdefault(device, {})
        for row in rows:
            if not row["result"].startswith("FAILS"):
                kept = row["result"].startswith("passes")
                groups.setdefault(row["group"], {})[row["promise"]] = "passes" if kept else row["reason"]
        file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def cell(promises: Mapping[str, str]) -> str:
    """A cell of the table in docs/support.md: one group on one device."""
    if not promises:
        return "not run"
    refused = [words for words in promises.values() if words != "passes"]
    kept = len(promises) - len(refused)
    return "; ".join([f"{kept} of {len(promises)} kept", *(f"refused: {words}" for words in refused)])
