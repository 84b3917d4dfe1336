"""Memory measurement and sizing, on a device whose memory figures are scripted."""

from types import SimpleNamespace

import pytest
import torch

from model_runner_base import DeviceMemoryProfiler, DeviceOps, MemoryInfo, ModelRunnerWorker


class ScriptedOps(DeviceOps):
    """A device of 1,000 bytes of which ``used`` are taken."""

    used = 0

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=1000 - self.used, total=1000)


def test_profiler_measures_what_stays_taken() -> None:
    ops = ScriptedOps(torch.device("cpu"))
    ops.used = 100
    with DeviceMemoryProfiler(ops) as profiler:
        ops.used += 300  # a model and its temporaries
        ops.used -= 50  # the temporaries
    assert profiler.consumed_memory == 250


def test_plain_host_reports_its_memory() -> None:
    info = DeviceOps(torch.device("cpu")).memory_info()
    assert 0 < info.free <= info.total


@pytest.mark.parametrize(
    ("asked", "used", "step", "sharing", "expected"),
    [
        (None, 200, 100, 1, 600),  # 90 % of 1000, less 200 taken, less 100 for a step
        (None, 950, 100, 1, 0),
        (400, 200, 100, 1, 400),
        (300, 200, 100, 2, 300),
    ],
)
def test_available_memory(asked: int | None, used: int, step: int, sharing: int, expected: int) -> None:
    ops = ScriptedOps(torch.device("cpu"))
    ops.used = used
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(device_ops=ops, profile_run=lambda: step),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=asked, gpu_memory_utilization=0.9),
        _memory_at_start=MemoryInfo(free=1000, total=1000),
        _allowed_memory=900,
        _num_sharing=lambda: sharing,
    )
    assert ModelRunnerWorker.determine_available_memory(worker) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("step", "sharing"), [(700, 1), (200, 2)])
def test_asking_for_more_than_is_free_names_the_limits(step: int, sharing: int) -> None:
    ops = ScriptedOps(torch.device("cpu"))
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(device_ops=ops, profile_run=lambda: step),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=400, gpu_memory_utilization=0.9),
        _num_sharing=lambda: sharing,
    )
    with pytest.raises(ValueError, match="lower kv_cache_memory_bytes, max_num_batched_tokens"):
        ModelRunnerWorker.determine_available_memory(worker)  # type: ignore[arg-type]
