"""Host time of a decode step with a KV connector that does nothing, against a step without one.

    python -m benchmarks.host.connector [--json] [--steps N]

Our runner on the device that takes no time (harness/fake_device.py), fed by vLLM's own scheduler and by ours; prefix
caching and statistics are on. Time is the thread's in ``schedule``, in the runner (``execute_model``, ``sample_tokens``
and, under asynchronous scheduling, ``get_output``) and in ``update_from_output``. All four take turns of 64 steps.
Figures are medians.
"""

from itertools import product
from statistics import median
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.harness.report import make_parser, progress, show, steps_in_turns
from benchmarks.harness.runners import (
    MAX_NUM_TOKENS,
    NUM_BLOCKS,
    Lane,
    Side,
    init_process,
    layered_config,
    length_of,
    make_scheduler,
)
from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.scheduling import make_scheduler as make_row_scheduler

COUNTS = (64, 256)


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector that moves nothing."""

    moves_whole_blocks = loads_between_steps = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def register_kv_caches(self, kv_caches: Any) -> None:
        pass


class Decoding(Lane):
    """Lane of our runner under vLLM's scheduler or ours, with a connector or without."""

    def __init__(self, is_async: bool, is_ours: bool, is_connected: bool) -> None:
        config = layered_config(is_async, PagedAttentionBackend)
        if is_connected:
            config.kv_transfer_config = KVTransferConfig(
                kv_connector=IdleConnector.__name__, kv_connector_module_path=__name__, kv_role="kv_both"
            )
        scheduler_cls = make_row_scheduler if is_ours else AsyncScheduler if is_async else Scheduler
        scheduler = make_scheduler(scheduler_cls, config, NUM_BLOCKS, MAX_NUM_TOKENS)
        super().__init__(Side.ours(config), scheduler, is_async)

    def start(self, count: int) -> None:
        """Lets ``count`` requests decode."""
        self.side.device.is_live = True
        for index in range(count):
            self.add(length_of(index), 2500)
        while min(request.num_output_tokens for request in self.scheduler.requests.values()) < 12:
            self.step()
        self.side.runner.make_buffers(count, 0)
        self.replay()

    def timed_step(self) -> tuple[int, int, int]:
        """Nanoseconds of ``schedule``, the runner and ``update_from_output`` in one step."""
        self.schedule_ns = self.side.step_ns = self.update_ns = 0
        self.step()
        return self.schedule_ns, self.side.step_ns, self.update_ns


def measure(lanes: dict[str, Decoding], count: int, num_steps: int) -> dict[str, float]:
    """Median microseconds a step and part, by lane, and the ratios of the step with a connector to the one without."""
    for lane in lanes.values():
        lane.start(count)
    times = steps_in_turns({name: lane.timed_step for name, lane in lanes.items()}, num_steps)
    for lane in lanes.values():
        lane.close()
    values: dict[str, float] = {}
    whole = {name: median(map(sum, steps)) / 1e3 for name, steps in times.items()}
    for name, steps in times.items():
        parts = [median(part) / 1e3 for part in zip(*steps, strict=True)]
        labels = ("schedule", "runner", "update")
        values |= {f"{name} {label}": round(us, 1) for label, us in zip(labels, parts, strict=True)}
    for side in ("vllm", "ours"):
        values[f"{side} ratio"] = round(whole[f"{side} connected"] / whole[side], 3)
    return values


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=512, help="timed steps a case")
    args = parser.parse_args()
    counts, num_steps = ((8,), 4) if args.quick else (COUNTS, args.steps)
    init_process()
    rows: list[dict[str, Any]] = []
    for is_async in (False, True):
        lanes = {
            f"{'ours' if is_ours else 'vllm'}{' connected' if is_connected else ''}": Decoding(
                is_async, is_ours, is_connected
            )
            for is_ours, is_connected in product((False, True), repeat=2)
        }
        for count in progress(counts, "asynchronous" if is_async else "synchronous"):
            rows.append({"requests": count, "async": is_async, **measure(lanes, count, num_steps)})
    show(rows, args.json)


if __name__ == "__main__":
    main()
