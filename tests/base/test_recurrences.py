"""Recurrences in steps of decode rows and chunk tiles equal loops over each request's tokens in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.caches.states import BLOCKS, StateCaches
from model_runner_base.models.recurrent import layers
from model_runner_base.models.recurrent.delta_rule import (
    channel_delta_rows,
    channel_delta_tiles,
    channel_products,
    delta_rows,
    delta_tiles,
    unit_lower_inverse,
)
from model_runner_base.models.recurrent.layers import Recurrence
from model_runner_base.models.recurrent.mamba import mamba1_rows, mamba1_tiles, mamba2_rows, mamba2_tiles
from model_runner_base.models.recurrent.operations import convolve, scan
from model_runner_base.models.recurrent.step import DecodeSteps, RecurrentStep, TileSteps
from model_runner_base.step.call import TILE_POSITIONS, TILE_SLOTS, TILE_STARTS, ChunkTiles, DecodeRows
from model_runner_base.step.token_layout import fill_tiles

D, N, H, G, P, K, V, TAPS = 6, 4, 4, 2, 3, 5, 3, 4


def conv_case(rng: np.random.Generator, length: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [rng.normal(size=(length, D))], [rng.normal(size=(D, 1, TAPS)), rng.normal(size=D)]


def conv_loop(inputs: list[np.ndarray], params: list[np.ndarray]) -> np.ndarray:
    (x,), (weight, bias) = inputs, params
    padded = np.concatenate((np.zeros((TAPS - 1, D)), x))
    return np.stack([(padded[t : t + TAPS] * weight[:, 0].T).sum(0) + bias for t in range(len(x))])


def mamba1_case(rng: np.random.Generator, length: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    inputs = [rng.normal(size=(length, D)), rng.uniform(0, 2, (length, D)), *rng.normal(size=(2, length, N))]
    return inputs, [-rng.uniform(0, 1.5, (D, N))]


def mamba1_loop(inputs: list[np.ndarray], params: list[np.ndarray]) -> np.ndarray:
    state, outs = np.zeros((D, N)), []
    for x, dt, b, c in zip(*inputs, strict=True):
        state = state * np.exp(dt[:, None] * params[0]) + (dt * x)[:, None] * b
        outs.append(state @ c)
    return np.stack(outs)


def mamba2_case(rng: np.random.Generator, length: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    inputs = [rng.normal(size=(length, H, P)), rng.uniform(0, 2, (length, H)), *rng.normal(size=(2, length, G, N))]
    return inputs, [-rng.uniform(0, 1.5, H)]


def mamba2_loop(inputs: list[np.ndarray], params: list[np.ndarray]) -> np.ndarray:
    state, outs = np.zeros((H, P, N)), []
    for x, dt, b, c in zip(*inputs, strict=True):
        b, c = b.repeat(H // G, axis=0), c.repeat(H // G, axis=0)
        state = state * np.exp(dt * params[0])[:, None, None] + (dt[:, None] * x)[:, :, None] * b[:, None]
        outs.append((state * c[:, None]).sum(2))
    return np.stack(outs)


def delta_case(rng: np.random.Generator, length: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    # Keys of length 1, often nearly equal, and decays from none to strong ones.
    k = rng.normal(size=(length, H, K)) * rng.choice([0.01, 1]) + rng.normal(size=(1, H, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log, beta = -rng.uniform(0, rng.choice([0.01, 2]), (length, H)), rng.uniform(0, 1, (length, H))
    return [rng.normal(size=(length, H, V)), rng.normal(size=(length, H, K)), k, log, beta], []


def channel_delta_case(rng: np.random.Generator, length: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Decays of a head's channels from none to some that leave nothing, next to each other."""
    (v, q, k, _, beta), _ = delta_case(rng, length)
    return [v, q, k, -rng.uniform(0, rng.choice([0.01, 2, 60], K), (length, H, K)), beta], []


def delta_loop(inputs: list[np.ndarray], params: list[np.ndarray]) -> np.ndarray:
    state, outs = np.zeros((H, K, V)), []
    for v, q, k, log, beta in zip(*inputs, strict=True):
        state = state * np.exp(log).reshape(H, -1, 1)
        wrong = v - np.einsum("hk,hkv->hv", k, state)
        state = state + k[:, :, None] * (beta[:, None] * wrong)[:, None]
        outs.append(np.einsum("hk,hkv->hv", q, state))
    return np.stack(outs)


@dataclass(frozen=True)
class Kind:
    """A recurrence, random inputs for it, the loop that it equals, and the shape of its state."""

    case: Callable[..., tuple[list[np.ndarray], list[np.ndarray]]]
    loop: Callable[..., np.ndarray]
    state: tuple[int, ...]
    run: Callable[..., torch.Tensor]


def run_conv(inputs: Any, params: Any, states: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    return convolve(inputs[0], *params, states, step)


KINDS = {
    "convolution": Kind(conv_case, conv_loop, (TAPS - 1, D), run_conv),
    "mamba1": Kind(mamba1_case, mamba1_loop, (D, N), Recurrence(mamba1_rows, mamba1_tiles).run),
    "mamba2": Kind(mamba2_case, mamba2_loop, (H, P, N), Recurrence(mamba2_rows, mamba2_tiles).run),
    "delta rule": Kind(delta_case, delta_loop, (H, K, V), Recurrence(delta_rows, delta_tiles).run),
    "channel delta rule": Kind(
        channel_delta_case, delta_loop, (H, K, V), Recurrence(channel_delta_rows, channel_delta_tiles).run
    ),
}


class Requests:
    """Requests that are computed in steps of chunks of any size, each with two states of its own among dirty ones.

    A step reads the one, and writes the same or the other, as where prefixes are kept.
    """

    def __init__(self, kind: Kind, lengths: list[int], tile: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.tile, self.done = kind, tile, [0] * len(lengths)
        cases = [kind.case(rng, length) for length in lengths]
        self.params = cases[0][1]
        self.inputs = [case[0] for case in cases]
        self.outs: list[list[np.ndarray]] = [[] for _ in lengths]
        self.states = torch.full((2 * len(lengths) + 2, *kind.state), float("nan"))
        self.state_of, self.other = (rng.permutation(2 * len(lengths) + 1)[1:] + 1).reshape(2, -1)
        self.rng = rng

    def step(self, counts: dict[int, int], spare: int) -> None:
        """Runs ``counts`` tokens of each request, one token as a decode row; adds ``spare`` rows, tiles and tokens."""
        rows = [index for index, count in counts.items() if count == 1]
        chunks = [index for index, count in counts.items() if count > 1]
        num_rows = len(rows) + spare
        order = [*rows, *[None] * spare, *chunks]
        before, moves = self.state_of.copy(), self.rng.random(len(self.done)) < 0.3
        moves[[index for index in range(len(self.done)) if index not in counts]] = False
        self.state_of, self.other = np.where(moves, (self.other, self.state_of), (self.state_of, self.other))
        states, sources = torch.zeros(2, num_rows, dtype=torch.int32)
        states[: len(rows)] = torch.from_numpy(self.state_of[rows].astype(np.int32))
        sources[: len(rows)] = torch.from_numpy(before[rows].astype(np.int32))
        has_state = torch.tensor([self.done[index] > 0 for index in rows] + [False] * spare, dtype=torch.bool)
        tiles = self._tiles(chunks, before, counts, spare) if chunks else None
        step = RecurrentStep((DecodeSteps(states, sources, has_state),), tiles)
        parts = [self._part(index, counts) for index in order] + [self._part(None, {})] * (spare if chunks else 0)
        inputs = tuple(torch.from_numpy(np.concatenate(each)).float() for each in zip(*parts, strict=True))
        params = tuple(torch.from_numpy(each).float() for each in self.params)
        out = self.kind.run(inputs, params, self.states, step).double().numpy()
        start = 0
        for index in order:
            count = 1 if index is None else counts[index]
            if index is not None:
                self.outs[index].append(out[start : start + count])
                self.done[index] += count
            start += count

    def _part(self, index: int | None, counts: dict[int, int]) -> list[np.ndarray]:
        if index is None:
            return [np.ones((1, *each.shape[1:])) for each in self.inputs[0]]
        return [each[self.done[index] : self.done[index] + counts[index]] for each in self.inputs[index]]

    def _tiles(self, chunks: list[int], before: np.ndarray, counts: dict[int, int], spare: int) -> TileSteps:
        lengths = np.array([counts[index] for index in chunks], np.int64)
        num_tiles = -(-lengths // self.tile)
        arrays = {
            TILE_STARTS: np.zeros(num_tiles.sum() + spare + 1, np.int32),
            TILE_POSITIONS: np.zeros(num_tiles.sum() + spare, np.int32),
            TILE_SLOTS: np.zeros(lengths.sum() + spare, np.int32),
        }
        computed = np.array([self.done[index] for index in chunks], np.int64)
        fill_tiles(self.tile, lengths, computed, *arrays.values())
        tiles = ChunkTiles.of({name: torch.from_numpy(each) for name, each in arrays.items()}, self.tile)
        indices = np.zeros((2, num_tiles.sum() + spare), np.int32)
        indices[:, : num_tiles.sum()] = np.stack((self.state_of[chunks], before[chunks])).repeat(num_tiles, axis=1)
        return TileSteps.of(tiles, *torch.from_numpy(indices))


@pytest.mark.parametrize("name", KINDS)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    tile=st.sampled_from([8, 16, 32]),
    spare=st.integers(0, 2),
    at_once=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=examples(100), deadline=None)
def test_steps_equal_a_loop(name: str, lengths: list[int], tile: int, spare: int, at_once: int, seed: int) -> None:
    """Chunks of 1 to 40 tokens, requests in any order, states that held NaN before: nothing of them is seen. Tiles are
    computed at once, or some at a time."""
    kind, rng = KINDS[name], np.random.default_rng(seed)
    requests = Requests(kind, lengths, tile, seed)
    while any(done < length for done, length in zip(requests.done, lengths, strict=True)):
        left = {index: length - requests.done[index] for index, length in enumerate(lengths)}
        names = [index for index in rng.permutation(len(lengths)).tolist() if left[index] and rng.random() < 0.8]
        if names:
            counts = {index: min(left[index], int(rng.choice([1, 1, 2, 7, 16, 40]))) for index in names}
            with patch.object(layers, "TILES_AT_ONCE", at_once):
                requests.step(counts, spare)
    for inputs, outs in zip(requests.inputs, requests.outs, strict=True):
        want = kind.loop(inputs, requests.params)
        np.testing.assert_allclose(np.concatenate(outs), want, rtol=1e-4, atol=2e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("name", KINDS)
def test_states_of_less_than_float32_are_rounded_at_no_border_between_pieces(name: str) -> None:
    """Outputs of a request do not depend on where it is cut, which follows what it is batched with."""
    outs = []
    for at_once in (1, 8):
        requests = Requests(KINDS[name], [60], tile=8, seed=0)
        requests.states = requests.states.bfloat16()
        with patch.object(layers, "TILES_AT_ONCE", at_once):
            requests.step({0: 60}, spare=0)
        outs.append(np.concatenate(requests.outs[0]))
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("name", KINDS)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    query=st.integers(2, 4),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=examples(50), deadline=None)
def test_wrong_drafts_leave_no_trace(name: str, lengths: list[int], query: int, seed: int) -> None:
    """Rows of several tokens, some of the last of which are wrong, equal loops over those that are right."""
    kind, rng = KINDS[name], np.random.default_rng(seed)
    limits: Any = SimpleNamespace(decode=SimpleNamespace(query=query), max_model_len=100, unread=0)
    table: Any = SimpleNamespace(block_size=100)
    caches = StateCaches(table, [], limits)
    cases = [kind.case(rng, length) for length in lengths]
    params = tuple(torch.from_numpy(each).float() for each in cases[0][1])
    states = torch.full((query * (len(lengths) + 2), *kind.state), float("nan"))
    state_of = torch.tensor([*(rng.permutation(len(lengths)) + 1), 0], dtype=torch.int32)
    done, outs = np.zeros(len(lengths) + 1, np.int64), [list[np.ndarray]() for _ in lengths]
    while (done[:-1] < lengths).any():
        row_inputs, num_right, num_tokens = [], [], []
        for (inputs, _), start, length in zip(cases, done.tolist(), lengths, strict=False):
            right = int(rng.integers(min(1, length - start), min(query, length - start) + 1))
            noise = kind.case(rng, query)[0]
            parts = zip(inputs, noise, strict=True)
            row_inputs.append([np.concatenate((known[start : start + right], wrong[right:])) for known, wrong in parts])
            num_right.append(right)
            num_tokens.append(int(rng.integers(right, query + 1)) if right else 0)
        row_inputs.append(kind.case(rng, query)[0])  # Padding
        index = torch.arange(query)
        positions = torch.from_numpy(done).unsqueeze(1) + index
        rows = DecodeRows(positions, index < torch.tensor([*num_tokens, 0]).unsqueeze(1))
        call: Any = SimpleNamespace(arrays={BLOCKS: state_of.unsqueeze(1)})
        values = tuple(torch.from_numpy(np.concatenate(each)).float() for each in zip(*row_inputs, strict=True))
        out = kind.run(values, params, states, RecurrentStep(caches._rows(call, rows), None)).double().numpy()
        for request, right in enumerate(num_right):
            outs[request].append(out[request * query : request * query + right])
            done[request] += right
    for (inputs, _), got in zip(cases, outs, strict=True):
        want = kind.loop(inputs, cases[0][1])
        np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-4, atol=2e-5 * max(1, np.abs(want).max()))


def test_inverse_of_nearly_equal_keys() -> None:
    """I + L with all entries of L near 1, as equal keys give it."""
    strict = torch.full((2, 64, 64), 0.999).tril(-1)
    inverse = unit_lower_inverse(strict)
    product = inverse.double() @ (strict + torch.eye(64)).double()
    torch.testing.assert_close(product, torch.eye(64).double().expand(2, -1, -1), rtol=0, atol=1e-4)


def test_products_under_decays_that_leave_nothing() -> None:
    """Decays whose inverse is beyond float32 in one channel, and no decay in another."""
    rows, columns = torch.randn(2, 3, 64, K)
    log = (torch.rand(64, K) * torch.tensor([-200, -20, -2, -0.01, 0])).cumsum(dim=0)
    decay = torch.exp((log.double().unsqueeze(1) - log.double()).clamp(max=0))
    want = torch.einsum("nqk,nsk,qsk->nqs", rows.double(), columns.double(), decay).tril()
    torch.testing.assert_close(channel_products(rows, columns, log.expand(3, -1, -1)).double(), want, rtol=0, atol=1e-4)


def test_scan_equals_a_loop() -> None:
    factors, terms = torch.randn(13, 3, 3), torch.randn(13, 3, 2)
    state, want = torch.zeros(3, 2), []
    for factor, term in zip(factors, terms, strict=True):
        state = factor @ state + term
        want.append(state)
    torch.testing.assert_close(scan(factors, terms, torch.matmul), torch.stack(want), rtol=1e-4, atol=1e-4)
