"""Graphs cut at their collectives give what the whole function gives, and refuse what a cut would get wrong."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_xla

from model_runner_base.heads.sampling.sampler import CutVocabulary, SamplingMode, sample
from model_runner_base.step.graph_policy import SortLimits
from model_runner_base.step.sizes import StepKind, StepSize
from neuron_runner import communicator, cutting
from neuron_runner.communicator import CollectiveError, NeuronCommunicator
from neuron_runner.compilation import CompiledFunction
from neuron_runner.cutting import CutExecutable, _HostCollective
from neuron_runner.executable import UnsupportedGraphError
from neuron_runner.metrics import CompilationCount


def size_of(rows: int) -> StepSize:
    return StepSize(StepKind.DECODE, (rows,))


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NeuronCommunicator]:
    """Communicator of a group of one rank, whose collectives travel the whole way all the same."""
    is_ours = not dist.is_initialized()  # Else an engine that another test still holds has made the group.
    if is_ours:
        store = tmp_path_factory.mktemp("store") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield NeuronCommunicator(dist.group.WORLD, unique_name="lone")
    if is_ours:
        dist.destroy_process_group()


@pytest.fixture
def twice(lone: NeuronCommunicator, monkeypatch: pytest.MonkeyPatch) -> NeuronCommunicator:
    """Communicator that acts as if another rank had the same values: a sum is twice one's own."""

    def double(x: torch.Tensor, group: dist.ProcessGroup) -> None:
        x.mul_(2)

    monkeypatch.setattr(communicator.dist, "all_reduce", double)
    return lone


def check(
    function: Callable[..., torch.Tensor], state: list[torch.Tensor], expected_state: list[torch.Tensor]
) -> CompiledFunction:
    """Compares ``function(size, x, state)`` compiled and eager at several sizes, with other values in each call."""
    device = torch_xla.device()
    compiled = CompiledFunction(lambda size, x: function(size, x, state), state)
    generator = torch.Generator().manual_seed(0)
    for rows in (4, 3, 1, 4, 4):
        x = torch.randn(rows, 4, generator=generator)
        result = compiled(size_of(rows), x.to(device))
        torch.testing.assert_close(result.cpu(), function(size_of(rows), x, expected_state))
        for got, want in zip(state, expected_state, strict=True):
            torch.testing.assert_close(got.cpu(), want)
    assert all(isinstance(executable, CutExecutable) for executable, _ in compiled._executables.values())
    return compiled


def test_state_is_updated_on_both_sides_of_a_collective(twice: NeuronCommunicator) -> None:
    def step(size: StepSize, x: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        (rows,) = size.dims
        first, second = state
        first[:rows].add_(x)
        total = twice.all_reduce(x * first.sum())
        first.mul_(0.5)
        second.add_(first.sum())
        again = twice.all_reduce(total.reshape(-1) + second.sum())
        return again.view(rows, 4) + first[:rows] + x

    state = [torch.ones(4, 4), torch.zeros(2)]
    check(step, [x.to(torch_xla.device()) for x in state], [x.clone() for x in state])


def test_sizes_and_tuples_cross(twice: NeuronCommunicator) -> None:
    def step(size: StepSize, x: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        doubled_rows = torch.cat((left, right)).shape[0]
        total = twice.all_reduce(left)
        state[0].add_(total.sum())
        return (total * doubled_rows + right) + twice.all_gather(x, dim=-1)[:, :2]

    check(step, [torch.zeros(1).to(torch_xla.device())], [torch.zeros(1)])


def test_a_collectives_result_may_be_updated_in_place(twice: NeuronCommunicator) -> None:
    """A collective's result may be changed in place, as by models that scale their gathered logits."""

    def step(size: StepSize, x: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        state[0].add_(1)
        gathered = twice.all_reduce(x)[..., :3]
        gathered *= 3.0
        return gathered

    check(step, [torch.zeros(1).to(torch_xla.device())], [torch.zeros(1)])


@pytest.mark.parametrize(
    ("limits", "num_collectives"), [(SortLimits(), [1, 2]), (SortLimits(3, 8), [1, 3, 3])], ids=str
)
def test_samplers_of_a_shared_vocabulary_are_cut(
    lone: NeuronCommunicator, limits: SortLimits, num_collectives: list[int]
) -> None:
    """Tokens are those of the whole rows, at several numbers of rows and in every mode, also where the next step
    reads them."""
    device = torch_xla.device()
    generator = torch.Generator().manual_seed(1)
    vocabulary = CutVocabulary(0, 22, 1, 20, lone.all_gather)
    floats = torch.tensor([[0.0, 1.0, 0.0], [0.9, 1.0, 0.0], [1.5, 1.0, 0.2], [2.0, 0.8, 0.0]])
    ints = torch.tensor([[20, 0, 0], [20, 7, 8], [20, 9, 1], [4, 3, 3]], dtype=torch.int32)
    modes = vocabulary.modes(limits)
    for mode, count in zip(modes, num_collectives, strict=True):
        last = [torch.zeros(*shape, dtype=torch.int32).to(device) for shape in ((5, 1), (5,))]
        compiled = CompiledFunction(partial(sample, mode, False, limits, vocabulary=vocabulary), last)
        for rows in (4, 1, 3, 4):
            logits = torch.randn(rows, 20, generator=generator)
            padded = vocabulary.own(torch.nn.functional.pad(logits, (0, 2), value=9.0))
            slots = torch.stack((torch.arange(rows), torch.arange(rows) + 50)).to(torch.int32)
            expected = [x.cpu() for x in last]
            tokens = sample(mode, False, limits, logits, slots, floats, ints, *expected)
            arguments = (x.to(device) for x in (padded, slots, floats, ints))
            assert compiled(*arguments, *last).tolist() == tokens.tolist()  # type: ignore[union-attr]
            assert [x.tolist() for x in last] == [x.tolist() for x in expected]
        for executable, _ in compiled._executables.values():
            assert isinstance(executable, CutExecutable)
            assert sum(isinstance(step, _HostCollective) for step in executable._steps) == count
    assert (SamplingMode.SORTED in modes) == (limits.max_candidates is not None)


def test_layers_that_are_alike_are_compiled_once(twice: NeuronCommunicator) -> None:
    device, generator = torch_xla.device(), torch.Generator().manual_seed(0)
    weights = [torch.randn((4, 4), generator=generator).to(device) for _ in range(8)]

    def step(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = twice.all_reduce(x @ weight)
        return x + 1

    before = CompilationCount.now().compilations
    result = CompiledFunction(step, [])(torch.ones(2, 4).to(device))
    assert CompilationCount.now().compilations == before + 2
    expected = torch.ones(2, 4)
    for weight in weights:
        expected = 2 * (expected @ weight.cpu())
    torch.testing.assert_close(result.cpu(), expected + 1)


def test_another_value_may_not_be_updated_behind_a_collective(twice: NeuronCommunicator) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        total = twice.all_reduce(x)
        y.add_(total)
        return total + y

    with pytest.raises(UnsupportedGraphError, match="update nothing in place but its state"):
        CompiledFunction(step, [])(torch.ones(2, 4).to(torch_xla.device()))


def test_a_view_of_state_may_not_cross(twice: NeuronCommunicator) -> None:
    state = [torch.zeros(2, 4).to(torch_xla.device())]

    def step(x: torch.Tensor) -> torch.Tensor:
        row = state[0][0]
        total = twice.all_reduce(x)
        row.add_(total)
        return total + state[0].sum()

    with pytest.raises(UnsupportedGraphError, match="view of state"):
        CompiledFunction(step, state)(torch.ones(4).to(torch_xla.device()))


def test_an_in_graph_collective_of_this_device_is_refused(
    lone: NeuronCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective in a graph would, across processes of PJRT CPU, return its own input."""
    monkeypatch.setattr(lone, "global_world_size", 2)
    with pytest.raises(CollectiveError, match="2 workers run, but the XLA runtime knows of 1"):
        lone.all_reduce(torch.ones(2).to(torch_xla.device()))


def test_a_lost_peer_is_told_plainly(lone: NeuronCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: torch.Tensor, group: dist.ProcessGroup) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(communicator.dist, "all_reduce", fail)
    with pytest.raises(CollectiveError, match=r"another worker has ended .* Connection reset by peer"):
        lone.all_reduce(torch.ones(2))


def exchange(rank: int, store: Path, results: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    lone = NeuronCommunicator(dist.group.WORLD, unique_name="pair")
    mine = torch.arange(8.0).view(2, 4) + 10 * rank
    device = torch_xla.device()
    in_graph = CompiledFunction(lambda x: lone.all_reduce(x * 2) + 1, [])(mine.to(device)).cpu()
    results_here = lone.all_reduce(mine), lone.all_gather(mine), lone.all_gather(mine, 0), lone.reduce_scatter(mine)
    torch.save([in_graph, *results_here], results / str(rank))
    dist.destroy_process_group()


def test_two_processes_exchange(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(exchange, (tmp_path / "store", tmp_path), nprocs=2)
    zero, one = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4) + 10
    for rank in range(2):
        in_graph, total, wide, tall, part = torch.load(tmp_path / str(rank))
        assert in_graph.equal(2 * (zero + one) + 1)
        assert total.equal(zero + one)
        assert wide.equal(torch.cat((zero, one), dim=1))
        assert tall.equal(torch.cat((zero, one), dim=0))
        assert part.equal((zero + one)[:, 2 * rank : 2 * rank + 2])


class Layers(torch.nn.Module):
    """Four layers that are alike, and one more product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = torch.nn.Linear(width, 3)


@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("crosses", [True, False])
def test_large_layers_are_compiled_once(is_large: bool, crosses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with weights of a given size are pieces of their own, unless a view of the state crosses them."""
    width = 16
    monkeypatch.setattr(cutting, "LARGE_LAYER", 4 * width * width + (0 if is_large else 1))
    torch.manual_seed(0)
    host = Layers(width)
    device = copy.deepcopy(host).to(torch_xla.device())
    state, expected_state = [torch.ones(4, width).to(torch_xla.device())], [torch.ones(4, width)]

    def step(model: Layers, state: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        view = state[0][:2]
        for layer in model.layers:
            x = torch.tanh(layer(x)) + (view if crosses else state[0][:2]).sum()
            state[0].mul_(0.5)
        return model.head(x)

    compiled = CompiledFunction(partial(step, device, state), state)
    with torch.no_grad():
        for seed in range(3):
            x = torch.randn(5, width, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(compiled(x.to(torch_xla.device())).cpu(), step(host, expected_state, x))
            torch.testing.assert_close(state[0].cpu(), expected_state[0])
    is_cut = is_large and not crosses
    assert [isinstance(made, CutExecutable) for made, _ in compiled._executables.values()] == [is_cut]
    # The first piece makes nothing, the layers are one graph, and the head is another.
    assert compiled._compiler.num_graphs == (2 if is_cut else 1)


def test_layers_that_add_to_their_input_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece cannot update what another one has made, as Falcon's layers do."""
    monkeypatch.setattr(cutting, "LARGE_LAYER", 1)
    host = Layers(16)
    device = copy.deepcopy(host).to(torch_xla.device())

    def step(model: Layers, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        for layer in model.layers:
            hidden += layer(hidden)
        return model.head(hidden)

    compiled = CompiledFunction(partial(step, device), [])
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.to(torch_xla.device())).cpu(), step(host, x))
    assert not any(isinstance(made, CutExecutable) for made, _ in compiled._executables.values())
