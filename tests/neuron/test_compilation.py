"""Compiled graphs: none after warm-up, whatever comes; sizes that Dynamo fixes are noticed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch_xla
from conftest import engine
from vllm import SamplingParams

from model_runner_base.step.sizes import StepKind, StepSize
from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.engine import runner_of
from model_runner_base.testing.models import TinyModel
from neuron_runner.compilation import CompiledFunction
from neuron_runner.executable import Compiler, Executable, UnsupportedGraphError
from neuron_runner.metrics import CompilationCount


def size_of(*dims: int) -> StepSize:
    return StepSize(StepKind.DECODE, dims)


BUCKETS = {
    "num_batched_tokens_buckets": [24, 64],
    "num_seqs_buckets": [1, 6],
    "context_length_buckets": [100, 512],
}


def test_every_bucket_serves_captured_once_and_compiled_ahead(tiny_model: Callable[[str], TinyModel]) -> None:
    """Requests of every length and sampling mode arrive at random; further ones then hit the remaining buckets."""
    rng = np.random.default_rng(0)
    options = {"max_num_seqs": 6, "max_model_len": 512, "additional_config": {"neuron_config": BUCKETS}}
    before_start = CompilationCount.now()
    with engine(tiny_model("llama").path, **options) as llm:
        warm = CompilationCount.now()
        assert warm.compilations > before_start.compilations
        # Every further size is XLA's work alone: decode, mixed, prompt logits, 3 samplers, 4 stages, 2 logprobs.
        assert warm.captures - before_start.captures == 12
        runner = runner_of(llm)
        sizes = set(runner.graph_policy.sizes)
        served: set[StepSize] = set()
        dispatch = runner.graph_policy.dispatch

        def record(need: StepSize) -> StepSize:
            size = dispatch(need)
            assert size.num_tokens in runner.tokenwise_graph_batch_sizes
            served.add(size)
            return size

        runner.graph_policy.dispatch = record  # type: ignore[method-assign]
        core = llm.llm_engine
        for count in range(4000):
            # Seasons of all lengths, of few requests, and of long ones with short prompts among them.
            lengths, rate = [([1, 2, 3, 10, 15, 50, 200, 450], 0.3), ([1, 40, 450], 0.03), ([450, 450, 2, 3], 0.3)][
                count // 100 % 3
            ]
            if rng.random() < rate and core.get_num_unfinished_requests() < 8:
                length = int(rng.choice(lengths))
                params = SamplingParams(
                    temperature=float(rng.choice([0.0, 0.7])),
                    top_k=int(rng.choice([0, 10])),
                    max_tokens=int(rng.integers(1, 62)),
                    ignore_eos=True,
                    detokenize=False,
                )
                prompt = rng.integers(3, VOCAB_SIZE, length).tolist()
                core.add_request(str(count), {"prompt_token_ids": prompt}, params)
            core.step()
            if count > 300 and served == sizes:
                break
        assert served == sizes, f"never served: {sizes - served}"
        assert CompilationCount.now() == warm


@pytest.mark.parametrize("several", [True, False])
def test_one_capture_serves_many_sizes_and_updates_state_in_place(several: bool) -> None:
    """One capture serves sizes of which several are expected. Else each size that comes nevertheless has its own
    capture, and the same results."""
    device = torch_xla.device()
    weight = torch.arange(12.0).reshape(4, 3).to(device)

    def step(size: StepSize, packed: torch.Tensor) -> torch.Tensor:
        rows, extra = size.dims
        state[0].index_put_((torch.arange(rows, dtype=torch.int64, device=device),), packed[:rows])
        return state[0].sum() + (packed[rows : rows + extra].view(-1, 1) * weight.sum()).sum()

    state = [torch.zeros(16).to(device)]
    compiled = CompiledFunction(step, state, has_several=lambda sizes: several)
    expected = np.zeros(16)
    for rows, extra in [(5, 7), (2, 3), (1, 1), (5, 7), (1, 9), (16, 1)]:
        packed = np.random.default_rng(rows).normal(size=rows + extra).astype(np.float32)
        result = compiled(size_of(rows, extra), torch.from_numpy(packed).to(device))
        expected[:rows] = packed[:rows]
        assert abs(result.item() - (expected.sum() + packed[rows:].sum() * 66)) < 1e-3
        np.testing.assert_allclose(state[0].cpu(), expected, rtol=1e-6)
    assert [len(captures) for captures in compiled._captures.values()] == [1 if several else 5]


def test_tensor_sizes_that_tracing_fixes_get_a_capture_of_their_own() -> None:
    """A first call with one row fixes that dimension; more rows must not run the same graph."""
    device = torch_xla.device()
    state = [torch.zeros(1).to(device)]

    def step(x: torch.Tensor) -> torch.Tensor:
        state[0].add_(1.0)
        return (x.sum(dim=0) * x.shape[0]).sum()

    compiled = CompiledFunction(step, state)
    assert [compiled(torch.ones(n, 2).to(device)).item() for n in (1, 4, 3, 1)] == [2, 32, 18, 2]


def test_a_size_that_is_fixed_by_tracing_gets_a_capture_of_its_own() -> None:
    """Dynamo fixes sizes of 0 and 1, and those a function branches on; other sizes must not run that graph."""
    device = torch_xla.device()
    state = [torch.zeros(1).to(device)]

    def step(size: StepSize, x: torch.Tensor) -> torch.Tensor:
        factor = 10.0 if size.dims[0] == 3 else 1.0
        state[0].add_(1.0)
        return x[: size.dims[0]].sum() * factor

    compiled = CompiledFunction(step, state)
    x = torch.ones(8).to(device)
    results = [compiled(size_of(n), x).item() for n in (1, 3, 5, 6, 3, 1)]
    assert results == [1, 30, 5, 6, 30, 1]


def test_branches_on_sizes_are_not_served_to_other_sizes() -> None:
    device = torch_xla.device()
    state = [torch.zeros(1).to(device)]

    def by_int(size: StepSize, x: torch.Tensor) -> torch.Tensor:
        state[0].add_(1.0)
        return x[: size.dims[0]].sum() * (10.0 if size.dims[0] > 3 else 1.0)

    def by_shape(x: torch.Tensor) -> torch.Tensor:
        state[0].add_(1.0)
        return x.sum() * (10.0 if x.shape[0] > 3 else 1.0)

    ones = torch.ones(8).to(device)
    compiled = CompiledFunction(by_int, state)
    assert [compiled(size_of(n), ones).item() for n in (5, 1, 2, 6)] == [50, 1, 2, 60]
    compiled = CompiledFunction(by_shape, state)
    assert [compiled(torch.ones(n).to(device)).item() for n in (5, 2, 1, 6)] == [50, 2, 1, 60]


def test_features_in_bfloat16(tiny_model: Callable[[str], TinyModel]) -> None:
    """Logits are float32 for every stage, whatever the model runs in: no stage meets a graph of another type."""
    few = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [128]}
    shared = {"max_tokens": 5, "ignore_eos": True, "detokenize": False}
    with engine(
        tiny_model("llama").path,
        dtype="bfloat16",
        max_model_len=128,
        logprobs_mode="processed_logprobs",
        additional_config={"neuron_config": few},
    ) as llm:
        warm = CompilationCount.now()
        for options in (
            {"logit_bias": {5: 1.0}, "presence_penalty": 1.0},
            {"temperature": 0.8, "top_p": 0.9, "seed": 1, "repetition_penalty": 1.1, "logprobs": 2},
            {"allowed_token_ids": list(range(3, 90)), "temperature": 0, "prompt_logprobs": 3},
        ):
            params = SamplingParams(**shared, **options)
            (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 5
        assert CompilationCount.now() == warm


HALF = torch.tensor(0.5)


def test_numbers_in_host_tensors_become_constants() -> None:
    device = torch_xla.device()
    state = [torch.zeros(1).to(device)]

    def step(x: torch.Tensor) -> torch.Tensor:
        state[0].add_(1.0)
        return x * HALF

    compiled = CompiledFunction(step, state)
    assert compiled(torch.ones(3).to(device)).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    "graph",
    [
        lambda x: (x + 1, x),
        lambda x: (x.sum(),) * 2,
        lambda x: (x.add_(1.0) * 2,),
        lambda x: (x + torch.rand_like(x),),
    ],
    ids=["returns an input", "returns a value twice", "updates what is not its state", "draws"],
)
def test_what_a_graph_cannot_take_over_is_refused(graph: Callable[[torch.Tensor], tuple[torch.Tensor]]) -> None:
    with pytest.raises(UnsupportedGraphError):
        Executable(graph, [torch.ones(3).to(torch_xla.device())], {0: 0})


def test_compiling_ahead_runs_nothing_and_donates_only_to_those_that_update() -> None:
    device = torch_xla.device()
    state, compiler = [torch.zeros(4).to(device)], Compiler()
    add = CompiledFunction(lambda x, total: total.add_(x).sum(), state, compiler)
    read = CompiledFunction(lambda total, x: (total * 2, x + 1), [], compiler)
    before = CompilationCount.now()
    x = torch.ones(4).to(device)

    def warm_up() -> None:
        for _ in range(2):
            add(x, state[0])
            doubled, _ = read(state[0], x)
            assert doubled.tolist() == [0, 0, 0, 0]

    with compiler.ahead():
        warm_up()
    compiled = CompilationCount.now()
    assert compiled.compilations == before.compilations + 2
    assert state[0].tolist() == [0, 0, 0, 0]
    for count in (1, 2, 3):
        assert add(x, state[0]).item() == 4 * count
        assert read(state[0], x)[0].tolist() == [2 * count] * 4
        assert state[0].tolist() == [count] * 4
    assert CompilationCount.now() == compiled


def test_an_error_while_compiling_ahead_ends_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    function = CompiledFunction(lambda x: x + 1, [], compiler)
    x = torch.ones(5).to(torch_xla.device())

    def fail(self: Executable) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError), compiler.ahead():
        patch.setattr(Executable, "compile", fail)
        function(x)
    assert not compiler.is_ahead


@pytest.mark.parametrize("dims", [1, 2])
def test_an_assignment_by_mask_holds_for_every_mask(dims: int) -> None:
    """A mask is read in every call; lazy tracing itself would keep the places of the first mask."""
    device = torch_xla.device()

    def step(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        before = doubled.sum()
        doubled[positions == 0] = 7
        return doubled + before

    compiled = CompiledFunction(step, [])
    for positions in ([0, 1, 2], [1, 0, 0], [1, 2, 3], [0, 0, 0]):
        given = torch.arange(3 * 2.0).view(3, 2)[:, : dims * 2 - 1].squeeze(1), torch.tensor(positions)
        assert compiled(*(each.to(device) for each in given)).cpu().equal(step(*given))


def test_an_assignment_by_mask_to_what_others_see_is_refused() -> None:
    def step(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        doubled[0][positions == 0] = 7
        return doubled

    device = torch_xla.device()
    with pytest.raises(UnsupportedGraphError, match=r"boolean mask: use torch\.where"):
        CompiledFunction(step, [])(torch.ones(2, 3).to(device), torch.arange(3).to(device))
