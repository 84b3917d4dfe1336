"""The KV cache in the host's memory: what is free, what it takes of that, and what the log says about it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from conftest import engine
from vllm.config import CacheConfig
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

import model_runner_base.worker
from model_runner_base import MemoryInfo
from model_runner_base.device_ops import host_memory
from model_runner_base.runner.memory import host_cache_memory, weights_memory
from model_runner_base.testing.engine import core_of, runner_of
from model_runner_base.testing.models import TinyModel

GIB = 1 << 30
MACHINE = 64 * GIB, 48 * GIB


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB, of which 48 are free."""
    memory = SimpleNamespace(total=MACHINE[0], available=MACHINE[1])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def write_group(folder: Path, version: int, limit: int | str, usage: int, active: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "" if version == 2 else "total_"
    counts = {"anon": 1, "active_file": 7, f"{prefix}active_file": active, f"{prefix}inactive_file": inactive}
    (folder / "memory.stat").write_text("".join(f"{name} {count}\n" for name, count in counts.items()))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("groups", "free", "total"),
    [
        ({}, 48, 64),
        ({"": ("max", 5, 1, 1)}, 48, 64),
        ({"": (16, 10, 1, 3)}, 10, 16),  # 4 of the 10 in use are cached files.
        ({"": (60, 10, 0, 0)}, 48, 60),  # Other groups use what this one may.
        ({"": (8, 9, 0, 0)}, 0, 8),
        ({"job/step": (16, 4, 0, 0), "job": (12, 4, 0, 0), "": ("max", 20, 0, 0)}, 8, 12),
        ({"job/step": ("max", 4, 0, 0), "job": (32, 30, 2, 0)}, 4, 32),
    ],
)
def test_memory_is_what_control_groups_leave(
    version: int, groups: dict[str, tuple[Any, ...]], free: int, total: int, tmp_path: Path
) -> None:
    mounted = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = ["0::/job/step"] if version == 2 else ["5:cpu,memory:/job/step", "4:pids:/elsewhere", "0::/"]
    (tmp_path / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    for path, (limit, *counts) in groups.items():
        # Version 1 has no word for a group without a limit.
        bound = limit * GIB if limit != "max" else "max" if version == 2 else (1 << 63) - 4096
        write_group(mounted / path, version, bound, *(count * GIB for count in counts))
    assert host_memory(tmp_path) == (free * GIB, total * GIB)


@pytest.mark.usefixtures("machine")
def test_system_without_control_groups(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == (MACHINE[1], MACHINE[0])


SPECS = {"layer": FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)}
TOKEN = 2 * 2 * 32 * 4
"""Bytes of a token's key and value in the one layer."""


def config(share: float | None, max_model_len: int, num_seqs: int = 64, blocks: int | None = None) -> Any:
    options = {} if share is None else {"gpu_memory_utilization": share}
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    return SimpleNamespace(
        cache_config=CacheConfig(block_size=32, num_gpu_blocks_override=blocks, **options),
        model_config=SimpleNamespace(max_model_len=max_model_len, original_max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=num_seqs, disable_hybrid_kv_cache_manager=False),
        parallel_config=parallel,
        speculative_config=None,
        kv_transfer_config=None,
    )


@pytest.mark.parametrize(
    ("share", "free", "expected"),
    [
        (None, 20, 9),  # Half of what the step leaves of the free memory.
        (0.5, 40, 20),  # 32 less weights and step.
        (0.5, 12, 10),  # What is free, less the step.
        (CacheConfig.gpu_memory_utilization, 20, 9),  # vLLM's own default: the user set none.
    ],
)
def test_share_of_the_hosts_memory(share: float | None, free: int, expected: int) -> None:
    vllm_config = config(share, max_model_len=1 << 20)
    memory = MemoryInfo(free=free * GIB, total=64 * GIB)
    assert host_cache_memory(vllm_config, SPECS, memory, 10 * GIB, 2 * GIB, 0.5) == expected * GIB


def test_no_more_than_requests_can_use() -> None:
    memory = MemoryInfo(free=40 * GIB, total=64 * GIB)
    found = host_cache_memory(config(None, 256, num_seqs=4), SPECS, memory, GIB, GIB, 0.5)
    assert found == 2 * (4 * 256 + 32) * TOKEN  # Twice the requests and the null block.


@pytest.mark.parametrize(
    ("share", "remedy"), [(None, "set kv_cache_memory_bytes, lower"), (0.5, "raise gpu_memory_utilization, lower")]
)
def test_memory_that_holds_no_request_is_an_error(share: float | None, remedy: str) -> None:
    vllm_config, memory = config(share, 1 << 20), MemoryInfo(free=GIB, total=4 * GIB)
    with pytest.raises(ValueError, match=f"a request of max_model_len=1048576 takes 0.50 GiB: {remedy} max_model_len"):
        host_cache_memory(vllm_config, SPECS, memory, 2 * GIB, GIB // 2, 0.5)
    with pytest.raises(ValueError, match=r"0\.00 GiB are left for the KV cache: 1\.00 GiB are free"):
        host_cache_memory(vllm_config, {}, memory, 2 * GIB, 2 * GIB, 0.5)
    # Here vLLM lowers the length, or takes the number of blocks that the user set.
    vllm_config.model_config.original_max_model_len = -1
    for each in (vllm_config, config(share, 1 << 20, blocks=4)):
        assert 0 < host_cache_memory(each, SPECS, memory, GIB, 3 * GIB // 4, 0.5) <= GIB // 4


def test_shared_weights_count_once() -> None:
    first, second = torch.nn.Linear(3, 5), torch.nn.Linear(3, 5, bias=False)
    second.weight = first.weight
    second.register_buffer("scales", torch.zeros(7, dtype=torch.float16))
    assert weights_memory(torch.nn.ModuleList([first, second])) == (15 + 5) * 4 + 7 * 2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_engine_that_is_told_no_size(
    name: str, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds the requests twice, by vLLM's own count; the log has its size, and those of weights and step."""
    lines: list[str] = []
    monkeypatch.setattr(model_runner_base.worker.logger, "info", lambda *arguments: lines.append(str(arguments[0])))
    options: dict[str, Any] = {"kv_cache_memory_bytes": None, "max_model_len": 128, "enforce_eager": True}
    with engine(tiny_model(name).path, **options) as llm:
        vllm_config, planned = llm.llm_engine.vllm_config, core_of(llm).scheduler.kv_cache_config
        caches = {each.data_ptr(): each for each in runner_of(llm).parts.kv_caches}
        weights = sum(weight.nbytes for weight in runner_of(llm).model.parameters())
    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, planned)
    num_seqs = vllm_config.scheduler_config.max_num_seqs
    assert 2 * num_seqs < concurrency <= 2 * num_seqs + 0.5  # The null block is a part of a request.
    (line,) = (line for line in lines if line.startswith("Memory of a worker"))
    assert f"which are {2 * num_seqs}." in line and "requests of max_model_len=128" in line
    for what, num_bytes in (("weights", weights), ("KV cache", sum(each.nbytes for each in caches.values()))):
        assert float(line.partition(f"{what} ")[2].split()[0]) == pytest.approx(num_bytes / GIB, abs=0.0051), line
