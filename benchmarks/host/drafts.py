"""Host time of a step that verifies drafts, against a step of decode of the same requests.

    python -m benchmarks.host.drafts [--json] [--steps N]

Our runner under vLLM's own scheduler, on the device that takes no time (harness/fake_device.py), with an EAGLE head
that is always right: every step verifies 3 drafts of each request, moves it on by 4 tokens, and drafts 3 more. Time is
the thread's in ``execute_model``, ``sample_tokens`` and (under asynchronous scheduling) ``get_output``; the scheduler
is not timed. Both take turns of 64 steps.
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.harness.fake_device import DraftingRunner
from benchmarks.harness.models import BUNDLED_MODEL
from benchmarks.harness.report import make_parser, progress, show, steps_in_turns
from benchmarks.harness.runners import (
    MAX_NUM_TOKENS,
    NUM_BLOCKS,
    Lane,
    Side,
    init_process,
    layered_config,
    make_scheduler,
)
from model_runner_base.attention.paged import PagedAttentionBackend

NUM_DRAFTS = 3
COUNTS = (1, 8, 64, 256)
PROMPT = 100


def write_head(path: Path) -> dict[str, Any]:
    """Writes a head that is nothing but a config, since no weight is loaded; returns its ``speculative_config``."""
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return {"method": "eagle", "model": str(path), "num_speculative_tokens": NUM_DRAFTS}


class Verifying(Lane):
    """Lane of our runner under vLLM's scheduler, with drafts if there is a ``speculative_config``."""

    def __init__(self, is_async: bool, speculative_config: dict[str, Any] | None) -> None:
        config = layered_config(is_async, PagedAttentionBackend, speculative_config=speculative_config)
        scheduler_cls = AsyncScheduler if is_async else Scheduler
        scheduler = make_scheduler(scheduler_cls, config, NUM_BLOCKS, MAX_NUM_TOKENS)
        super().__init__(Side.ours(config, DraftingRunner), scheduler, is_async)
        self._tells_drafts = speculative_config is not None and not is_async

    def step(self) -> Any:
        results = super().step()
        if self._tells_drafts:
            self.scheduler.update_draft_token_ids(self.side.runner.take_draft_token_ids())
        return results

    def timed_step(self) -> int:
        """Nanoseconds of the runner in one step."""
        self.side.step_ns = 0
        self.step()
        return self.side.step_ns


def measure(lanes: dict[str, Verifying], count: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of host time a step, by lane."""
    for lane in lanes.values():
        lane.side.device.is_live = True
        for _ in range(count):
            lane.add(PROMPT, 3000)
        while any(request.num_output_tokens < 12 for request in lane.scheduler.requests.values()):
            lane.step()
        lane.replay()
    times = steps_in_turns({name: lane.timed_step for name, lane in lanes.items()}, num_steps)
    for lane in lanes.values():
        lane.close()
    return {f"{name}_us": round(median(values) / 1e3, 1) for name, values in times.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=256, help="timed steps a case")
    args = parser.parse_args()
    counts, num_steps = ((8,), 16) if args.quick else (COUNTS, args.steps)
    init_process()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        head = write_head(Path(directory))
        for is_async in (False, True):
            lanes = {name: Verifying(is_async, drafts) for name, drafts in (("decode", None), ("verify", head))}
            for count in progress(counts, "asynchronous" if is_async else "synchronous"):
                values = measure(lanes, count, num_steps)
                ratio = round(values["verify_us"] / values["decode_us"], 2)
                rows.append({"requests": count, "async": is_async, **values, "ratio": ratio})
    show(rows, args.json)


if __name__ == "__main__":
    main()
