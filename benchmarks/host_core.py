"""Steps a second of a whole engine core on a device that takes no time: vLLM's scheduler and runner, or ours.

    python -m benchmarks.host_core [--json] [--steps N]

vLLM's own ``EngineCore`` steps them, with its batch queue under asynchronous scheduling; what it hands to the front end
is dropped. All requests decode; prefix caching and statistics are on. Time is the thread's CPU time, in turns of 64
steps after eight that do not count. See host_step.py for what is a fake, and for the parts of a step.
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.report import make_parser, show
from model_runner_base.testing.platform_choice import choose_platform

COUNTS = (256, 1024)
TURN, SETTLING = 64, 8


@contextmanager
def cores(is_async: bool, count: int) -> Iterator[dict[str, Any]]:
    """Engine cores of each side with ``count`` requests that decode; the device replays its results."""
    from benchmarks.core_engine import ours, stock

    sides = {"stock": stock(is_async), "ours": ours(is_async)}
    for side in sides.values():
        side.start(count)
    yield sides
    for side in sides.values():
        side.core.shutdown()


def measure(is_async: bool, count: int, num_steps: int) -> dict[str, float]:
    spent = {"stock": 0, "ours": 0}
    with cores(is_async, count) as sides:
        gc.collect()
        gc.disable()
        for _ in range(num_steps // TURN):
            for name, side in sides.items():
                for _ in range(SETTLING):
                    side.step()
                start = time.thread_time_ns()
                for _ in range(TURN):
                    side.step()
                spent[name] += time.thread_time_ns() - start
        gc.enable()
    rates = {f"{name}_steps_per_s": round(num_steps // TURN * TURN / ns * 1e9, 1) for name, ns in spent.items()}
    return rates | {"ratio": round(spent["stock"] / spent["ours"], 2)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=256, help="timed steps a case")
    args = parser.parse_args()
    choose_platform("examples.plain_device.PlainPlatform")
    from benchmarks.host_engine import init_process

    init_process()
    rows = [
        {"requests": count, "async": is_async, **measure(is_async, count, args.steps)}
        for is_async in (False, True)
        for count in COUNTS
    ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
