"""Capture and replay of steps, and packed buffers that outlast replays of others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context

import gpu_runner.cuda_graphs
import gpu_runner.device_ops
import gpu_runner.model_runner
from gpu_runner.cuda_graphs import StepGraphs
from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.packing import PackedStep, Packer, Section
from model_runner_base.step.sizes import StepKind, StepSize


def test_pieces_are_captured_after_a_run_without_them_and_replayed_from_then_on() -> None:
    """A forward context, which vLLM's pieces go by, is set for them during the call and as before after it."""
    seen: list[tuple[CUDAGraphMode, int | None]] = []
    context: Any = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.NONE, batch_descriptor=None)

    def step(size: StepSize) -> int:
        descriptor = context.batch_descriptor
        seen.append((context.cudagraph_runtime_mode, descriptor and descriptor.num_tokens))
        if size.num_reqs == 3:
            raise RuntimeError("the step failed")
        return size.num_reqs

    graphs = StepGraphs(step, lambda size: CUDAGraphMode.PIECEWISE)
    with override_forward_context(context):
        assert [graphs(StepSize(StepKind.MIXED, (8, num_reqs, num_reqs))) for num_reqs in (5, 4)] == [5, 4]
        with pytest.raises(RuntimeError, match="the step failed"):
            graphs(StepSize(StepKind.MIXED, (8, 3, 3)))
    piecewise = CUDAGraphMode.PIECEWISE
    assert seen == [(CUDAGraphMode.NONE, None), (piecewise, 8), (piecewise, 8), (piecewise, 8)]
    assert (context.cudagraph_runtime_mode, context.batch_descriptor) == (CUDAGraphMode.NONE, None)


def test_a_step_is_captured_once_in_the_shared_pool_after_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    @contextmanager
    def capturing(graph: Graph, pool: str, stream: str) -> Iterator[None]:
        done.append(f"capture in {pool} on {stream}")
        yield
        done.append("captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "side stream")
    platform = SimpleNamespace(get_global_graph_pool=lambda: "shared pool")
    monkeypatch.setattr(gpu_runner.cuda_graphs, "current_platform", platform)

    def step(size: StepSize, packed: torch.Tensor, entries: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        done.append("run")
        return [x.clone(), packed.clone()]

    graphs = StepGraphs(step, lambda size: CUDAGraphMode.FULL)
    size = StepSize(StepKind.DECODE, (2, 2, 2))
    packed, no_entries = torch.zeros(3), torch.tensor([[2], [0]])
    first, second = torch.ones(2), torch.full((2,), 5.0)
    graphs(size, packed, no_entries, first)
    assert done == ["run", "synchronize", "capture in shared pool on side stream", "run", "captured", "replay"]
    graphs(size, packed, no_entries, second)
    assert done[6:] == ["replay"] and len(graphs) == 1
    assert first.tolist() == [5, 5], "the captured input holds what was given"


class Pool:
    """Graphs whose results lie in one place: each replay spoils those of all others. A graph reads what it captured."""

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []

    def capture(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, tuple[torch.Tensor, ...]]:
        function(*args)
        results = tuple(result.clone() for result in function(*args))
        self.results += results

        def replay() -> None:
            for result in self.results:
                result.fill_(-1)
            for result, value in zip(results, function(*args), strict=True):
                result.copy_(value)

        return SimpleNamespace(replay=replay), results


def no_plan(size: StepSize) -> list[Section]:
    return [Section("numbers", (size.num_tokens,))]


@settings(deadline=None, max_examples=examples(200))
@given(st.data())
def test_a_packed_buffer_outlasts_replays_of_other_sizes(data: st.DataObject) -> None:
    """A step that repeats another sends what changed: the rest has to be there, whatever ran meanwhile.

    What it sends is written once, and not again with the next step. A size's buffers may be made anew.
    """
    pool, device_ops = Pool(), DeviceOps(torch.device("cpu"))

    def step(size: StepSize, packed: torch.Tensor, entries: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        packed = packed.index_put((entries[0],), entries[1])
        rows += 1  # A state of the device's, at the same address in every graph.
        return [packed[:-1] * 2, packed]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_runner.cuda_graphs, "capture", pool.capture)
        graphs = StepGraphs(step, lambda size: CUDAGraphMode.FULL)
        sizes = [StepSize(StepKind.DECODE, (count, count, count)) for count in (6, 3)]
        rows = torch.zeros(1, dtype=torch.int32)
        packer = Packer(no_plan, device_ops)
        last: dict[StepSize, PackedStep] = {}
        for number in range(1, data.draw(st.integers(2, 24))):
            size = data.draw(st.sampled_from(sizes))
            if size in last and data.draw(st.booleans()):
                packed = last[size]
                packed.entries.clear()
                places = data.draw(st.lists(st.integers(0, size.num_tokens - 1), max_size=2, unique=True))
                for index, place in enumerate(places):
                    packed.entries.array[:, index] = place, number
                    packed.buffer[place] = number
                packed.entries.count[0] = len(places)
                packed.send_entries()
            else:
                if data.draw(st.integers(0, 9)) == 0:
                    packer = Packer(no_plan, device_ops)
                packed = packer.at(size)
                packed.buffer[:-1] = range(100 * number, 100 * number + size.num_tokens)
                packed.send()
            result, packed.on_device = graphs(size, packed.on_device, packed.entries_on_device, rows)
            assert result.tolist() == (2 * packed.buffer[:-1]).tolist()
            assert packed.on_device[:-1].tolist() == packed.buffer[:-1].tolist()
            last[size] = packed
        assert len(graphs) <= 2


def test_a_repeated_step_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated step launches a replay and nothing else: the captured buffer is the one that is filled."""
    monkeypatch.setattr(gpu_runner.cuda_graphs, "capture", Pool().capture)
    graphs = StepGraphs(lambda size, packed, entries: [packed.clone()], lambda size: CUDAGraphMode.FULL)
    packed = PackedStep(
        StepSize(StepKind.DECODE, (2, 2, 2)), [Section("numbers", (2,))], DeviceOps(torch.device("cpu"))
    )
    packed.send()
    (packed.on_device,) = graphs(packed.size, packed.on_device, packed.entries_on_device)
    captured = packed.on_device
    for is_whole in (False, False, True, False):
        packed.entries.clear()
        (packed.send if is_whole else packed.send_entries)()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("copy_", "index_put_"):
                patch.setattr(torch.Tensor, name, lambda *args, name=name: pytest.fail(f"{name} was called"))
            graph = graphs._graphs[packed.size]._graph
            patch.setattr(graph, "replay", lambda: None)
            (packed.on_device,) = graphs(packed.size, packed.on_device, packed.entries_on_device)
        assert packed.on_device is captured
