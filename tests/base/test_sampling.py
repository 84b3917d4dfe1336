"""The sampler against NumPy and statistics, and seeds through the real engine."""

from collections.abc import Callable
from functools import reduce
from operator import or_

import numpy as np
import pytest
import torch
import torch_xla
from conftest import engine
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from vllm import LLM, SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.generate import most_asked
from model_runner_base.heads.sampling.logprobs import NO_LOGPROBS
from model_runner_base.heads.sampling.sampler import SamplingMode, SamplingStates, _gumbel, gumbel_noise, sample
from model_runner_base.step.graph_policy import SortLimits
from model_runner_base.step.request_states import DeviceRows
from model_runner_base.testing.models import TinyModel

VOCAB = 50


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """vLLM's documented rules in float64: temperature, min-p, top-k, top-p of what is left, renormalised."""
    scaled = logits.astype(np.float64) / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    order = np.argsort(-probabilities, kind="stable")
    if params.top_k > 0:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0
    return probabilities / probabilities.sum()


def draw(logits: np.ndarray, params: SamplingParams, seeds: list[int], positions: list[int]) -> np.ndarray:
    """Draws one token a (seed, position) through the sampler as the runner uses it."""
    count = len(seeds)
    states = SamplingStates(count, VOCAB, 0, DeviceOps(torch.device("cpu")))
    for row, seed in enumerate(seeds):
        states.admit(row, params, seed)
    slots = torch.tensor([list(range(count)), positions], dtype=torch.int32)
    recorded = DeviceRows(count, DeviceOps(torch.device("cpu"))).tensors
    rows = torch.from_numpy(np.tile(logits, (count, 1)).astype(np.float32))
    tokens = sample(SamplingMode(states.modes.max()), False, SortLimits(), rows, slots, *states.tables(), *recorded)
    assert torch.equal(recorded[0][:count, 0], tokens) and recorded[1][:count].tolist() == positions
    return tokens.numpy()


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.5, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=0.8, top_k=10, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(params: SamplingParams, vary: str) -> None:
    """Draws follow the distribution over seeds at one position, and over positions of one seed."""
    logits = np.random.default_rng(1).normal(size=VOCAB) * 2
    count = 20000
    seeds = list(range(count)) if vary == "seed" else [123] * count
    positions = [7] * count if vary == "seed" else list(range(count))
    observed = np.bincount(draw(logits, params, seeds, positions), minlength=VOCAB)
    expected = distribution(logits, params) * count
    assert observed[expected == 0].sum() == 0, "a token outside the kept set was drawn"
    common = expected > 20
    rest_observed, rest_expected = observed[~common].sum(), expected[~common].sum()
    categories = np.append(observed[common], rest_observed), np.append(expected[common], rest_expected)
    if rest_expected == 0:
        categories = observed[common], expected[common]
    if len(categories[0]) > 1:
        assert chisquare(*categories).pvalue > 1e-4


@given(st.integers(0, 2**63 - 1), st.integers(0, 100000), st.integers(1, VOCAB), st.floats(0.05, 1.0), st.floats(0, 1))
@settings(max_examples=examples(100), deadline=None)
def test_draws_stay_in_the_kept_set(seed: int, position: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(seed % 1000).normal(size=VOCAB) * 3
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    (token,) = draw(logits, params, [seed], [position])
    # A hair of slack: float32 sums may place a token on the other side of top-p.
    slack = SamplingParams(temperature=1.0, top_k=top_k, top_p=min(1.0, top_p + 1e-5), min_p=min_p * (1 - 1e-5))
    assert distribution(logits, slack)[token] > 0


def test_noise_is_finite_and_never_lets_an_excluded_token_through() -> None:
    """Noise is finite over a real vocabulary's worth of draws; float32 must not round a uniform value up to 1."""
    every_edge = torch.tensor([-1, 0, 1, -(1 << 31), (1 << 31) - 1, 255, 511, -512], dtype=torch.int32)
    assert torch.isfinite(_gumbel(every_edge)).all()
    seed = torch.full((1,), 7, dtype=torch.int32)
    high = torch.zeros(1, dtype=torch.int32)
    for position in range(0, 4000, 250):
        positions = torch.arange(position, position + 250, dtype=torch.int32)
        noise = gumbel_noise(seed.expand(250), high.expand(250), positions, 32000)
        assert torch.isfinite(noise).all() and noise.abs().max() < 20


def test_noise_is_the_same_on_every_device() -> None:
    """A seed means the same tokens wherever it runs; int32 shifts and products of negative numbers must agree."""
    rng = np.random.default_rng(0)
    low, high, position = (torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, 50).astype(np.int32)) for _ in range(3))
    device = torch_xla.device()
    there = gumbel_noise(low.to(device), high.to(device), position.to(device), 1000).cpu()
    torch.testing.assert_close(there, gumbel_noise(low, high, position, 1000), rtol=1e-5, atol=1e-5)


def test_greedy_rows_take_the_maximum_in_every_mode() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(3, VOCAB)).astype(np.float32))
    states = SamplingStates(3, VOCAB, 0, DeviceOps(torch.device("cpu")))
    states.admit(0, SamplingParams(temperature=0), 1)
    states.admit(1, SamplingParams(temperature=1.0, top_k=3), 2)
    states.admit(2, SamplingParams(temperature=0), 3)
    slots = torch.tensor([[0, 1, 2], [5, 5, 5]], dtype=torch.int32)
    for mode in SamplingMode:
        recorded = DeviceRows(3, DeviceOps(torch.device("cpu"))).tensors
        tokens = sample(mode, False, SortLimits(), logits, slots, *states.tables(), *recorded)
        assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    assert states.modes.tolist() == [SamplingMode.GREEDY, SamplingMode.SORTED, SamplingMode.GREEDY, SamplingMode.GREEDY]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 63), st.integers(0, 2), st.integers(-2, 20)), max_size=8))
@settings(deadline=None)
def test_a_batch_asks_for_what_its_sampled_rows_ask_for(wishes: list[tuple[bool, int, int, int]]) -> None:
    rows = np.random.default_rng(0).permutation(len(wishes))
    is_sampled = np.array([wish[0] for wish in wishes], bool)
    asked, num_logprobs = np.zeros((2, len(wishes)), np.int32)
    modes = np.zeros(len(wishes), np.int8)
    for row, (_, bits, mode, count) in zip(rows, wishes, strict=True):
        asked[row], modes[row], num_logprobs[row] = bits, mode, count
    sampled = [wish[1:] for wish in wishes if wish[0]] or [(0, 0, NO_LOGPROBS)]
    bits, modes_asked, counts = zip(*sampled, strict=True)
    wanted = (reduce(or_, bits), max(modes_asked), max(counts))
    assert most_asked(rows, is_sampled, asked, modes, num_logprobs, NO_LOGPROBS) == wanted


def test_two_seeds_that_differ_in_high_bits_differ() -> None:
    logits = np.zeros(VOCAB)
    params = SamplingParams(temperature=1.0)
    seeds = [5, 5 + (1 << 32), 5 + (1 << 40)]
    sequences = [draw(logits, params, [seed] * 20, list(range(20))).tolist() for seed in seeds]
    assert len({tuple(sequence) for sequence in sequences}) == 3


def sampled(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_unseeded_requests_differ_and_an_engine_seed_repeats(tiny_model: Callable[[str], TinyModel]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, detokenize=False)
    runs = []
    for _ in range(2):
        with engine(tiny_model("llama").path, max_model_len=256, seed=3, enforce_eager=True) as llm:
            runs.append(sampled(llm, [([5, 6, 7], params)] * 3))
    assert len({tuple(tokens) for tokens in runs[0]}) == 3
    assert runs[0] == runs[1]
