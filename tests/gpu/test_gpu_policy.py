"""Parts of the GPU runner: graph sizes against vLLM's own dispatcher, copies against a device that works late."""

import ast
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.model_executor.models.utils
import vllm.utils.mem_utils
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plain_device import code_lines
from test_structure import HOOKS, ROOT
from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.mem_utils import MemorySnapshot, memory_profiling
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as StockRunner
from vllm.v1.worker.utils import request_memory

import gpu_runner.cuda_graphs
import gpu_runner.device_ops
import gpu_runner.model_runner
from gpu_runner.cuda_graphs import StepGraphs
from gpu_runner.device_ops import COPIES_IN_FLIGHT, CudaDeviceOps
from gpu_runner.graph_policy import CudaGraphPolicy
from gpu_runner.model_runner import GPUModelRunner
from gpu_runner.worker import GPUWorker
from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.packing import PackedStep, Packer, Section
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize, Tiling


def test_runner_overrides_exactly_the_hooks() -> None:
    path = ROOT / "gpu_runner" / "model_runner.py"
    (runner,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert {node.name for node in runner.body if isinstance(node, ast.FunctionDef)} == HOOKS
    assert code_lines(path) < 120


def test_weights_are_offloaded_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's models, which go by the budget that stands when they are made; the next engine has its own."""
    budgets = []

    def load(*args: Any, **options: Any) -> nn.Module:
        budgets.append(vllm.model_executor.models.utils._CPU_OFFLOAD_MAX_BYTES)
        return nn.Identity()

    monkeypatch.setattr(gpu_runner.model_runner, "load_checkpoint", load)
    for gib in (1.5, 0):
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cpu_offload_gb=gib),
            compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
        )
        scheduler_config = SimpleNamespace(max_num_batched_tokens=8)
        runner = SimpleNamespace(vllm_config=config, scheduler_config=scheduler_config, device=torch.device("cpu"))
        GPUModelRunner.load_model(runner)  # type: ignore[arg-type]
    assert budgets == [3 << 29, 0]


# ---- Graph sizes ----


class Layer(AttentionLayerBase):
    def __init__(self, support: AttentionCGSupport) -> None:
        builder = SimpleNamespace(get_cudagraph_support=lambda vllm_config, spec: support)

        class Backend:
            get_builder_cls = staticmethod(lambda: builder)
            get_name = staticmethod(lambda: support.name)

        self.backend: Any = Backend

    def get_attn_backend(self) -> Any:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return "spec"


def make_config(mode: CUDAGraphMode, sizes: list[int], max_num_seqs: int, layer: Layer) -> Any:
    compilation = SimpleNamespace(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
        compile_sizes=None,
        cudagraph_specialize_lora=False,
        use_inductor_graph_partition=False,
        static_forward_context={"layer": layer},
        is_attention_compiled_piecewise=lambda: True,
        splitting_ops_contain_attention=lambda: True,
    )
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        speculative_config=None,
        lora_config=None,
    )


def make_dispatcher(config: Any, layer: Layer) -> CudagraphDispatcher:
    """vLLM's, after its own runner has resolved the mode."""
    dispatcher = CudagraphDispatcher(config)
    runner: Any = SimpleNamespace(
        vllm_config=config,
        compilation_config=config.compilation_config,
        uniform_decode_query_len=1,
        cudagraph_dispatcher=dispatcher,
        kv_cache_config=None,
        speculative_config=None,
    )
    StockRunner._check_and_update_cudagraph_mode(runner, [{layer.backend}], [SimpleNamespace(kv_cache_spec="spec")])
    return dispatcher


@settings(deadline=None, max_examples=300)
@given(
    mode=st.sampled_from(list(CUDAGraphMode)),
    support=st.sampled_from(list(AttentionCGSupport)),
    sizes=st.sets(st.integers(1, 40), min_size=1, max_size=6).map(sorted),
    max_num_seqs=st.integers(1, 24),
    steps=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 24)), min_size=1, max_size=8),
)
def test_sizes_are_vllms(
    mode: CUDAGraphMode, support: AttentionCGSupport, sizes: list[int], max_num_seqs: int, steps: list[tuple[int, int]]
) -> None:
    layer = Layer(support)
    ours, theirs = (make_config(mode, sizes, max_num_seqs, layer) for _ in range(2))
    policy = CudaGraphPolicy(ours)
    limits = StepLimits(50, max_num_seqs, 100, Tiling(1, 64), Tiling(16, 64))
    try:
        dispatcher = make_dispatcher(theirs, layer)
    except ValueError:
        with pytest.raises(ValueError, match="PIECEWISE"):
            policy.configure(limits)
        return
    policy.configure(limits)
    assert ours.compilation_config.cudagraph_mode == theirs.compilation_config.cudagraph_mode
    for num_tokens, num_reqs in steps:
        num_reqs = min(num_tokens, num_reqs, max_num_seqs)
        is_decode = num_tokens == num_reqs
        expected, padded = dispatcher.dispatch(num_tokens, uniform_decode=is_decode)
        kind = StepKind.DECODE if is_decode else StepKind.MIXED
        need = limits.size(kind, tokens=num_tokens, requests=num_reqs, logits=num_reqs)
        size = policy.dispatch(need)
        assert (policy.mode_of(size), size.num_tokens) == (expected, padded.num_tokens)
        assert size.holds(need._replace(kind=size.kind)) and size.num_reqs <= max_num_seqs
        assert size.num_logits == size.num_reqs
        if expected == CUDAGraphMode.FULL:
            assert size in policy.sizes, "captured ahead"
        elif expected == CUDAGraphMode.PIECEWISE:
            captured = {each.num_tokens for each in policy.sizes if policy.mode_of(each) == expected}
            assert size.num_tokens in captured, "captured ahead"
        elif expected == CUDAGraphMode.NONE:
            assert size == need


# ---- Graphs ----


def test_pieces_are_captured_after_a_run_without_them_and_replayed_from_then_on() -> None:
    """What vLLM's pieces go by is the forward context: it is theirs during the call, and nobody's after it."""
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


@settings(deadline=None, max_examples=200)
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
    """The captured buffer is the one that is filled, and stays the truth: a replay is all that is launched."""
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


# ---- Copies ----


def test_results_are_copied_once_they_are_there_and_kept_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the side stream, behind what was launched; torch's allocator hears of it."""
    done: list[str] = []

    class Side:
        def wait_stream(self, other: str) -> None:
            done.append(f"wait for {other}")

    class Event:
        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait for the event")

    @contextmanager
    def on(stream: Side) -> Iterator[None]:
        done.append("on the side stream")
        yield
        done.append("back")

    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Side())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the main stream")
    monkeypatch.setattr(gpu_runner.device_ops, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **kwargs: done.append("copy") or copy(*args, **kwargs))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: done.append("kept for the side stream"))
    wait = CudaDeviceOps(torch.device("cpu")).begin_to_host(torch.arange(3))
    expected = ["wait for the main stream", "on the side stream", "copy", "record", "back", "kept for the side stream"]
    assert done == expected
    assert wait().tolist() == [0, 1, 2] and done[len(expected) :] == ["wait for the event"]


class LateDevice:
    """Runs what is launched when it is waited for, in order, and no sooner."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.queue))):
            self.queue.pop(0)()

    def event(self) -> Any:
        position: list[int] = []
        launched = self

        class Event:
            def record(self) -> None:
                done = position.clear
                position[:] = [1]
                launched.queue.append(done)

            def synchronize(self) -> None:
                while position:
                    launched.run(1)

        return Event()


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 4)), min_size=1, max_size=4 * COPIES_IN_FLIGHT)
)
def test_a_host_array_may_change_as_soon_as_its_copy_was_launched(steps: list[tuple[int, bool, int]]) -> None:
    """Steps: the array's length, whether it goes where the last of that length went, and what the device does then."""
    device = LateDevice()
    copy = torch.Tensor.copy_

    def late(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(self, source)
        device.queue.append(lambda: copy(self, source))
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(torch.cuda, "Event", device.event)
        patch.setattr(gpu_runner.device_ops, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
        patch.setattr(torch.Tensor, "copy_", late)
        ops = CudaDeviceOps(torch.device("cpu"))
        arrays: dict[int, np.ndarray] = {}
        sent: list[tuple[torch.Tensor, list[int]]] = []
        last: dict[int, torch.Tensor] = {}
        for number, (length, stays, runs) in enumerate(steps):
            array = arrays.setdefault(length, np.zeros(length, np.int32))
            array[:] = number
            out = last.get(length) if stays else None
            last[length] = ops.to_device(array, out)
            assert out is None or last[length] is out
            sent = [(tensor, values) for tensor, values in sent if tensor is not last[length]]
            sent.append((last[length], array.tolist()))
            array[:] = -1
            device.run(runs)
        device.run(len(device.queue))
    for tensor, values in sent:
        assert tensor.tolist() == values


# ---- Memory ----


class CountingGpu:
    """A device's memory in bytes, as the driver and torch's allocator count it."""

    total = 80 << 30

    def __init__(self, others: int) -> None:
        self.used = others
        self.allocated = self.reserved = self.peak = 0

    def allocate(self, count: int) -> None:
        self.allocated += count
        self.peak = max(self.peak, self.allocated)
        grown = max(self.allocated, self.reserved) - self.reserved
        self.reserved += grown
        self.used += grown

    def empty_cache(self, device: Any = None) -> None:
        self.used -= self.reserved - self.allocated
        self.reserved = self.allocated

    def reset_peak(self, device: Any = None) -> None:
        self.peak = self.allocated

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Under their names in torch.cuda and in vLLM's platforms."""
        return {
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset_peak,
            "mem_get_info": lambda device=None: (self.total - self.used, self.total),
            "memory_reserved": lambda device=None: self.reserved,
            "memory_allocated": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.peak,
            "memory_stats": lambda device=None: {"allocated_bytes.all.peak": self.peak},
            "synchronize": lambda device=None: None,
        }


sizes_in_bytes = st.integers(0, 5 << 30)


@settings(deadline=None, max_examples=50)
@given(*[sizes_in_bytes] * 6, st.floats(0.5, 0.93))
def test_kv_cache_gets_what_vllms_worker_would_give_it(
    others: int, weights: int, kept: int, activations: int, early: int, late: int, utilization: float
) -> None:
    """``early`` and ``late``: what libraries take beside torch after start-up and during the profile."""

    def start(patch: pytest.MonkeyPatch) -> CountingGpu:
        patch.setattr(gc, "collect", lambda: 0)  # Slow, and nothing here is left to it.
        gpu = CountingGpu(others)
        functions = gpu.functions()
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        no_device = {"is_cuda": lambda: False, "current_device": lambda: "cpu", "device_name": "gpu"}
        patch.setattr(vllm.utils.mem_utils, "current_platform", SimpleNamespace(**functions, **no_device))
        return gpu

    def load(gpu: CountingGpu) -> None:
        gpu.used += early
        gpu.allocate(weights)

    def profile(gpu: CountingGpu) -> None:
        gpu.allocate(kept)
        gpu.allocate(activations)
        gpu.allocate(-activations)
        gpu.used += late

    cache_config: Any = SimpleNamespace(gpu_memory_utilization=utilization, kv_cache_memory_bytes=None)
    with pytest.MonkeyPatch.context() as patch:
        gpu = start(patch)
        snapshot = MemorySnapshot(device="cpu")
        requested = request_memory(snapshot, cache_config)
        load(gpu)
        with memory_profiling(snapshot, weights_memory=weights) as profiled:
            profile(gpu)
        theirs = requested - profiled.non_kv_cache_memory

    with pytest.MonkeyPatch.context() as patch:
        gpu = start(patch)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(torch.cuda, "Event", lambda: None)
        ops = CudaDeviceOps(torch.device("cpu"))
        runner = SimpleNamespace(
            device_ops=ops,
            profile_run=lambda: ops.peak_memory(lambda: profile(gpu)),
            useful_cache_memory=lambda: math.inf,
        )
        worker = object.__new__(GPUWorker)
        worker.cache_config, worker.model_runner = cache_config, runner  # type: ignore[assignment]
        worker.num_local_workers = 1
        worker.measure_at_start()
        load(gpu)
        assert worker.determine_available_memory() == theirs
