"""Host time of a step that verifies drafts, against a step of decode of the same requests.

    python -m benchmarks.verify_step [--json] [--steps N]

Our runner under vLLM's own scheduler, on the device that takes no time (fake_device.py), with an EAGLE head that is
always right: every step verifies 3 drafts of each request, moves it on by 4 tokens, and drafts 3 more. Time is the
thread's in ``execute_model``, ``sample_tokens`` and (under asynchronous scheduling) ``get_output``; the scheduler is
not timed. Both take turns of 64 steps.
"""

import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.report import make_parser, show
from model_runner_base.testing.platform_choice import choose_platform

NUM_DRAFTS = 3
TURN, SETTLING = 64, 8
COUNTS = (1, 8, 64, 256)


def write_head(model: Path, path: Path) -> dict[str, Any]:
    """Writes a head that is nothing but a config, since no weight is loaded; returns its ``speculative_config``."""
    config = json.loads((model / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return {"method": "eagle", "model": str(path), "num_speculative_tokens": NUM_DRAFTS}


def measure(sides: dict[str, Any], count: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of host time a step, by side."""
    for side in sides.values():
        side.start(count)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(-(-num_steps // TURN)):
        for name, side in sides.items():
            times[name] += [side.step() for _ in range(SETTLING + TURN)][SETTLING:]
    for side in sides.values():
        side.finish()
    return {f"{name}_us": round(median(values), 1) for name, values in times.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=256)
    args = parser.parse_args()
    choose_platform("examples.plain_device.PlainPlatform")
    from benchmarks.host_engine import init_process
    from benchmarks.models import BUNDLED_MODEL
    from benchmarks.verify_side import VerifySide

    init_process()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        head = write_head(BUNDLED_MODEL, Path(directory))
        for is_async in (False, True):
            sides = {name: VerifySide(is_async, drafts) for name, drafts in (("decode", None), ("verify", head))}
            for count in COUNTS:
                values = measure(sides, count, args.steps)
                ratio = round(values["verify_us"] / values["decode_us"], 2)
                rows.append({"requests": count, "async": is_async, **values, "ratio": ratio})
    show(rows, args.json)


if __name__ == "__main__":
    main()
