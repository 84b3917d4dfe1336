"""Cache operations against NumPy: exact, in place, as compiled functions with the caches as donated state."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_xla
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_runner.config import NeuronConfig
from neuron_runner.device_ops import XlaDeviceOps
from neuron_runner.graph_policy import OpenXlaPolicy
from neuron_runner.ops.cache import copy_blocks, reshape_and_cache, split_slots

KV_HEADS, HEAD_SIZE = 2, 4


def cache_of(num_blocks: int, block_size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_blocks, block_size, 2 * KV_HEADS, HEAD_SIZE)).astype(np.float32)


@st.composite
def writes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A cache, slots of which none but -1 is given twice, and the keys and values of each token: [T, 2 * K, D]."""
    block_size = draw(st.sampled_from([1, 2, 5, 16, 100, 256]))
    cache = cache_of(draw(st.integers(1, 9)), block_size, draw(st.integers(0, 99)))
    num_slots = cache.shape[0] * block_size
    slots = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=20))
    slots = draw(st.permutations(slots + [-1] * draw(st.integers(0 if slots else 1, 10))))
    brought = np.random.default_rng(len(slots)).normal(size=(len(slots), 2 * KV_HEADS, HEAD_SIZE))
    return cache, np.array(slots), brought.astype(np.float32)


def written(cache: np.ndarray, slots: np.ndarray, brought: np.ndarray) -> np.ndarray:
    cache = cache.copy()
    for slot, token in zip(slots, brought, strict=True):
        if slot != -1:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = token
    return cache


@st.composite
def copies(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A cache and pairs of blocks, a source perhaps another's destination, followed by padding with the null block."""
    cache = cache_of(draw(st.integers(2, 12)), draw(st.sampled_from([1, 2, 16, 256])), draw(st.integers(0, 99)))
    block = st.integers(0, len(cache) - 1)
    targets = draw(st.lists(st.integers(1, len(cache) - 1), unique=True, min_size=1, max_size=6))
    pairs = [(draw(block), target) for target in targets] + [(0, 0)] * draw(st.integers(0, 4))
    return cache, np.array(pairs)


def copied(cache: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    after = cache.copy()
    for source, target in pairs:
        after[target] = cache[source]
    return after


@given(writes())
@settings(max_examples=examples(200), deadline=None)
def test_reshape_and_cache_writes_what_numpy_writes(case: tuple) -> None:
    cache, slots, brought = case
    got, both = torch.from_numpy(cache.copy()), torch.from_numpy(brought)
    reshape_and_cache(both[:, :KV_HEADS], both[:, KV_HEADS:], got, torch.from_numpy(slots))
    np.testing.assert_array_equal(got, written(*case))


@given(copies())
@settings(max_examples=examples(200), deadline=None)
def test_copy_blocks_copies_what_numpy_copies(case: tuple) -> None:
    cache, pairs = case
    caches = [torch.from_numpy(cache.copy()), torch.from_numpy((cache * 100).astype(np.int32))]
    copy_blocks(caches, torch.from_numpy(pairs))
    np.testing.assert_array_equal(caches[0], copied(cache, pairs))
    np.testing.assert_array_equal(caches[1], copied((cache * 100).astype(np.int32), pairs))


def test_slots_of_large_caches_are_exact_on_the_device() -> None:
    """Slots are exact although the device divides integers as float32."""
    for block_size in (1, 3, 16, 100, 256):
        blocks = np.append(np.random.default_rng(0).integers(0, 1 << 22, 1000), (1 << 22) - 1)
        slots = np.concatenate([blocks * block_size, blocks * block_size + block_size - 1])
        got_blocks, got_offsets = split_slots(torch.from_numpy(slots).to(torch_xla.device()), block_size)
        np.testing.assert_array_equal(got_blocks.cpu(), slots // block_size)
        np.testing.assert_array_equal(got_offsets.cpu(), slots % block_size)


class Compiled:
    """Two caches on the device, and the operations on them as graphs."""

    def __init__(self, caches: list[np.ndarray]) -> None:
        self.ops = XlaDeviceOps(torch_xla.device())
        self.caches = [self.ops.to_device(cache) for cache in caches]
        torch_xla.sync()
        policy = OpenXlaPolicy(NeuronConfig())
        self.write = policy.wrap(self._write, self.caches)
        self.copy = policy.wrap(lambda pairs: copy_blocks(self.caches, pairs), self.caches)

    def _write(self, brought: torch.Tensor, slots: torch.Tensor) -> None:
        reshape_and_cache(brought[:, :KV_HEADS], brought[:, KV_HEADS:], self.caches[1], slots)

    @property
    def addresses(self) -> list[int]:
        return [self.ops.buffer_address(cache) for cache in self.caches]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(40, 1), (6, 16), (3, 256)])
def test_compiled(num_blocks: int, block_size: int) -> None:
    """Operations follow one another on the same donated caches: they are exact, and the caches stay where they are."""
    rng = np.random.default_rng(block_size)
    expected = [cache_of(num_blocks, block_size, seed) for seed in (0, 1)]
    compiled = Compiled(expected)
    before = compiled.addresses
    assert len(set(before)) == 2
    for num_real, num_padding in [(7, 1), (1, 7), (8, 0), (0, 8), (1, 0)]:
        slots = rng.permutation(np.append(rng.permutation(num_blocks * block_size)[:num_real], [-1] * num_padding))
        slots = slots.astype(np.int64)
        brought = rng.normal(size=(len(slots), 2 * KV_HEADS, HEAD_SIZE)).astype(np.float32)
        compiled.write(compiled.ops.to_device(brought), compiled.ops.to_device(slots))
        expected[1] = written(expected[1], slots, brought)
        pairs = np.array([(rng.integers(num_blocks), 1), (1, 2), (0, 0)])
        compiled.copy(compiled.ops.to_device(pairs))
        expected = [copied(cache, pairs) for cache in expected]
        for cache, want in zip(compiled.caches, expected, strict=True):
            np.testing.assert_array_equal(compiled.ops.to_host(cache), want)
        assert compiled.addresses == before


def test_no_graph_copies_a_cache(tmp_path: Path) -> None:
    """Caches are inputs of XLA's final programs that outputs take the place of, and nothing else has their size.

    A cache that is copied and written back would keep its address too.
    """
    script = "import test_cache_ops as t\nt.test_compiled(97, 16)"
    here = Path(__file__).parent
    helpers = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    flags = {"XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text", "PYTHONPATH": helpers}
    subprocess.run([sys.executable, "-c", script], cwd=here, env=os.environ | flags, check=True)
    programs = [path.read_text() for path in tmp_path.glob("*after_optimizations.txt")]
    programs = [text for text in programs if re.search(r"input_output_alias=\{ *\{0\}: ", text)]
    assert len(programs) == 3, "writes of 8 and of 1 tokens, and copies"
    cache_size = 97 * 16 * 2 * KV_HEADS * HEAD_SIZE
    for text in programs:
        results = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", text)
        whole = {name for shape, name in results if np.prod([int(size) for size in shape.split(",")]) == cache_size}
        assert whole <= {"parameter", "bitcast", "scatter", "fusion", "dynamic-update-slice"}, whole
