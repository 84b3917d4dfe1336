"""Results of a script that runs an engine in processes of its own, on the example device."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lane import WITH_PLAIN_PLATFORM


def results_of(
    script: Path | str,
    *args: Any,
    env: Mapping[str, str],
    names: Sequence[str] = ("RESULT",),
    timeout: float = 900,
) -> dict[str, Any]:
    """Runs ``script``, which prints a line of each name and a JSON value; returns the values by name.

    All that it printed is there as ``OUTPUT``. ``env`` has further variables. Raises AssertionError with the end of the
    output if a line is missing.
    """
    out = subprocess.run(
        [sys.executable, str(script), *map(str, args)],
        env=os.environ | WITH_PLAIN_PLATFORM | dict(env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    found = dict(line.split(" ", 1) for line in out.stdout.splitlines() if line.split(" ", 1)[0] in names)
    assert len(found) == len(names), out.stdout[-3000:] + out.stderr[-3000:]
    return {name: json.loads(value) for name, value in found.items()} | {"OUTPUT": out.stdout + out.stderr}
