"""Drawing among the likeliest tokens only: the distribution, the graph that it makes, and an engine that runs it."""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch_xla
from conftest import engine
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import VOCAB, distribution
from vllm import SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.logprobs import _top
from model_runner_base.heads.sampling.sampler import SamplingMode, SamplingStates, likeliest, sample
from model_runner_base.step.graph_policy import SortLimits
from model_runner_base.step.request_states import DeviceRows
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.statistics import check_counts
from neuron_runner import environment
from neuron_runner.config import NeuronConfig, OnDeviceSamplingConfig
from neuron_runner.graph_policy import OpenXlaPolicy
from neuron_runner.metrics import CompilationCount
from neuron_runner.sampling import MAX_SORT_WIDTH

NEURON_LIMITS = SortLimits(max_candidates=256, max_width=MAX_SORT_WIDTH)


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_likeliest_are_found_piece_by_piece(data: st.DataObject) -> None:
    """The likeliest are NumPy's, with forbidden tokens, ties, and pieces that end raggedly."""
    width, rows = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, min(6, width)))
    number = st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 3.0]) | st.floats(-9, 9, width=32)
    numbers = data.draw(st.lists(number, min_size=rows * width, max_size=rows * width))
    values = np.array(numbers, np.float32).reshape(rows, width)
    top, places = likeliest(torch.from_numpy(values), count, data.draw(st.sampled_from([None, 12, 16, 64])))
    np.testing.assert_array_equal(top.numpy(), -np.sort(-values)[:, :count])
    np.testing.assert_array_equal(np.take_along_axis(values, places.numpy(), 1), top.numpy())
    assert all(len(set(row)) == count and max(row) < width for row in places.tolist())


def test_places_of_forbidden_tokens_lie_in_the_vocabulary() -> None:
    """Pieces are taken of pieces, most of which hold nothing but forbidden tokens and padding."""
    values = torch.full((1, 257), float("-inf"))
    values[0, 200] = 1.0
    top, places = likeliest(values, 6, 12)
    assert top[0].tolist() == [1.0] + [float("-inf")] * 5
    assert places[0, 0] == 200 and places.max() < 257 and len(set(places[0].tolist())) == 6


def device_rows(count: int) -> list[torch.Tensor]:
    """The tensors of ``DeviceRows``."""
    return DeviceRows(count, DeviceOps(torch.device("cpu"))).tensors


def test_greedy_requests_keep_all_their_logits_beside_drawn_ones() -> None:
    states = SamplingStates(2, VOCAB, 0, DeviceOps(torch.device("cpu")))
    states.admit(0, SamplingParams(temperature=0), 1)
    states.admit(1, SamplingParams(), 2)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([[0, 1], [0, 0]], dtype=torch.int32)
    mode = SamplingMode(states.modes.max())
    _, processed = sample(mode, True, SortLimits(4, None), logits, slots, *states.tables(), *device_rows(2))
    assert processed.isfinite().sum(dim=-1).tolist() == [VOCAB, 4]
    assert torch.equal(processed[0], logits[0])


def draw(logits: np.ndarray, params: SamplingParams, count: int, limits: SortLimits) -> np.ndarray:
    """One token for each of ``count`` positions, in the cheapest mode that the parameters allow."""
    states = SamplingStates(1, VOCAB, 0, DeviceOps(torch.device("cpu")))
    states.admit(0, params, 123)
    slots = torch.stack((torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)))
    rows = torch.from_numpy(logits.astype(np.float32)).expand(count, -1)
    mode = SamplingMode(states.modes.max())
    return sample(mode, False, limits, rows, slots, *states.tables(), *device_rows(1)).numpy()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 30},
        {"top_k": 4},
        {"top_p": 0.7},
        {"temperature": 2.0, "top_p": 0.9, "top_k": 40, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_width", [None, 16])
def test_draws_follow_the_capped_distribution(params: dict, max_width: int | None) -> None:
    """Draws follow a top-k of the cap, then top-p over what it leaves, by the rules in float64."""
    cap = 8
    logits = np.random.default_rng(1).normal(size=VOCAB) * 2
    wanted = SamplingParams(**params)
    capped = SamplingParams(**(params | {"top_k": min(cap, wanted.top_k) if wanted.top_k > 0 else cap}))
    drawn = draw(logits, wanted, 10000, SortLimits(cap, max_width))
    check_counts(np.bincount(drawn, minlength=VOCAB), distribution(logits, capped), params)


def test_cap_that_does_not_bind_changes_no_draw() -> None:
    logits = np.random.default_rng(2).normal(size=VOCAB) * 2
    params = SamplingParams(top_k=6, top_p=0.9)
    exact = draw(logits, params, 2000, SortLimits())
    np.testing.assert_array_equal(draw(logits, params, 2000, SortLimits(8, 16)), exact)
    greedy = SamplingParams(temperature=0)
    assert set(draw(logits, greedy, 5, SortLimits(8, 16))) == {logits.argmax()}


def hlo_of(function: Callable[..., object], *arguments: torch.Tensor) -> str:
    """HLO that torch_xla hands to the device's compiler."""
    outputs = function(*(argument.to(torch_xla.device()) for argument in arguments))
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)  # type: ignore[call-overload]
    return torch_xla._XLAC._get_xla_tensors_hlo(tensors)


def sorted_rows(hlo: str) -> list[tuple[int, int]]:
    """Length of the rows of each sort, and how many of the largest are taken of each row."""
    found = []
    for name, width in re.findall(r"(%sort\.\d+) = \(?f32\[\d+,(\d+)\]", hlo):
        (element,) = re.findall(
            rf"(%get-tuple-element\.\d+) = f32\S+ get-tuple-element\(.*{re.escape(name)}\), index=0", hlo
        )
        taken = re.findall(rf"slice\(\S+ {re.escape(element)}\), slice={{\[0:\d+\], \[0:(\d+)\]}}", hlo)
        found.append((int(width), int(taken[0]) if taken else int(width)))
    return found


@pytest.mark.parametrize("mode", [SamplingMode.RANDOM, SamplingMode.SORTED])
def test_neuron_graph_sorts_no_vocabulary(mode: SamplingMode) -> None:
    """Sorts, as torch_xla lowers them, have rows of at most MAX_SORT_WIDTH, of which 256 are taken. Those of the
    logprobs' graph are as short."""
    vocab = 50000
    states = SamplingStates(2, vocab, 0, DeviceOps(torch.device("cpu")))
    states.admit(0, SamplingParams(top_p=0.9), 1)
    slots = torch.zeros(2, 2, dtype=torch.int32)
    arguments = torch.randn(2, vocab), slots, *states.tables(), *device_rows(2)
    assert sorted_rows(hlo_of(partial(sample, mode, False, NEURON_LIMITS), *arguments)) == [(12500, 256), (1024, 256)]
    if mode == SamplingMode.SORTED:
        # The check does see a sort of the whole vocabulary.
        assert sorted_rows(hlo_of(partial(sample, mode, False, SortLimits()), *arguments)) == [(vocab, vocab)]
    logprobs = partial(_top, False, NEURON_LIMITS.max_width)
    tokens = torch.zeros(2, dtype=torch.int32)
    assert sorted_rows(hlo_of(logprobs, arguments[0], tokens)) == [(12500, 20), (80, 20)]


@pytest.mark.parametrize(("limits", "temperature"), [(SortLimits(), 0.0), (NEURON_LIMITS, 0.01)], ids=str)
def test_ids_above_two_to_the_24_are_exact(limits: SortLimits, temperature: float) -> None:
    """Ids that are odd and this large have no number in float32, where they would become a neighbour."""
    vocab, token = (1 << 24) + 40, (1 << 24) + 33
    logits = torch.zeros(1, vocab)
    logits[0, token] = 50.0
    mode = SamplingMode.RANDOM if temperature else SamplingMode.GREEDY
    floats = torch.tensor([[temperature, 1.0, 0.0], [0.0, 1.0, 0.0]])
    ints = torch.tensor([[vocab, 1, 2]] * 2, dtype=torch.int32)
    device = torch_xla.device()
    arguments = logits, torch.zeros(2, 1, dtype=torch.int32), floats, ints, *device_rows(1)
    on_device = [argument.to(device) for argument in arguments]
    assert sample(mode, False, limits, *on_device).tolist() == [token]  # type: ignore[union-attr]
    assert on_device[-2].tolist() == [[token], [0]], "the token that the next step reads"
    _, places = likeliest(on_device[0], 2, limits.max_width)
    assert places[0, 0].item() == token


def test_neuron_devices_are_capped_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OpenXlaPolicy(NeuronConfig()).sort_limits == SortLimits()
    asked = NeuronConfig(on_device_sampling_config=OnDeviceSamplingConfig(global_topk=64))
    assert OpenXlaPolicy(asked).sort_limits == SortLimits(64, MAX_SORT_WIDTH)
    monkeypatch.setattr(environment, "neuron_device_visible", lambda: True)
    assert OpenXlaPolicy(NeuronConfig()).sort_limits == NEURON_LIMITS
    assert OpenXlaPolicy(asked).sort_limits == SortLimits(64, MAX_SORT_WIDTH)


def test_engine_draws_among_the_likeliest(tiny_model: Callable[[str], TinyModel]) -> None:
    """Tokens are among the likeliest at a temperature that makes all nearly alike; ranks are those of the model's
    own logits."""
    config = {
        "num_batched_tokens_buckets": [64],
        "num_seqs_buckets": [4],
        "context_length_buckets": [128],
        "on_device_sampling_config": {"global_topk": 3},
    }
    with engine(tiny_model("llama").path, max_model_len=128, additional_config={"neuron_config": config}) as llm:
        warm = CompilationCount.now()
        greedy, *drawn = llm.generate(
            [{"prompt_token_ids": [5, 6, 7]}] * 4,
            [
                SamplingParams(max_tokens=40, logprobs=5, ignore_eos=True, detokenize=False, **params)
                for params in (
                    {"temperature": 0},
                    {"temperature": 50.0},
                    {"temperature": 50.0, "top_k": 9},
                    {"top_p": 0.9},
                )
            ],
            use_tqdm=False,
        )
        assert CompilationCount.now() == warm
    ranks = [
        {step[token].rank for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)}
        for output in [greedy, *drawn]
    ]
    assert ranks[0] == {1} and ranks[1] == ranks[2] == {1, 2, 3} and ranks[3] <= {1, 2, 3}
    assert list(greedy.outputs[0].token_ids) == tiny_model("llama").greedy((5, 6, 7), 40)
