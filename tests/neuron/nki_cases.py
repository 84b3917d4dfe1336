"""A step of paged attention as the runner would make it, for the NKI kernels: metadata, cache, and the right output."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from attention_cases import batch_of, dense_attention
from bare_step import BareStep, padded
from hypothesis import strategies as st

from model_runner_base.attention.metadata import PagedAttentionMetadata
from model_runner_base.attention.plan import CAUSAL, KeyRange, kv_tile_for, stored_block_size
from model_runner_base.caches.attention_groups import whole_blocks
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import COMMON_DIMS, StepLimits, Tiling

DECODE = ((40, 1), (0, 1), (300, 1), (129, 1))
PREFILL = ((0, 70), (0, 5), (0, 130))
MIXED = ((37, 1), (0, 33), (200, 40), (512, 1), (64, 64), (5, 3))
WHOLE = ((0, 70), (0, 1), (0, 5), (0, 130), (0, 300))


@dataclass(frozen=True)
class Case:
    """``requests`` are (tokens computed, tokens scheduled): those with one token have a decode row, all others a chunk.

    ``reach`` is about how many positions a KV tile has, ``chunk_reach`` one of a chunk's if that is another number.
    With ``padding`` the step's buffer has so much to spare of everything, and has held a step of longer requests.
    """

    requests: tuple[tuple[int, int], ...] = MIXED
    heads: tuple[int, int] = (4, 2)
    head_size: int = 16
    block_size: int = 16
    reach: int = 128
    query_tile: int = 16
    key_range: KeyRange = CAUSAL
    soft_cap: float = 0.0
    dtype: torch.dtype = torch.float32
    padding: int = 3
    seed: int = 0
    chunk_reach: int | None = None

    @property
    def stored(self) -> int:
        """Tokens in a block of the cache tensor."""
        return stored_block_size(self.block_size, self.reach)

    @property
    def decode(self) -> Tiling:
        return Tiling(1, kv_tile_for(self.block_size, self.reach))

    @property
    def chunk(self) -> Tiling:
        return Tiling(self.query_tile, whole_blocks(self.stored, self.chunk_reach or self.reach))

    @property
    def window(self) -> int | None:
        """Window of the layer, where it looks back alone."""
        return None if self.key_range.is_whole else self.key_range.window or None

    def keys_seen(self, position: int, length: int) -> np.ndarray:
        """Keys that a token sees of its request of ``length`` tokens."""
        window, chunk, is_whole = self.key_range
        key = np.arange(length)
        is_seen = (key <= position) | is_whole
        if window:
            is_seen &= np.abs(key - position) < window
        if chunk:
            is_seen &= key // chunk == position // chunk
        return np.flatnonzero(is_seen)

    def __str__(self) -> str:
        names = {DECODE: "decode", PREFILL: "prefill", MIXED: "mixed", WHOLE: "whole"}
        options = [f"cs{self.chunk_reach}"] if self.chunk_reach else []
        options += [f"{name}{size}" for name, size in zip("wc", self.key_range, strict=False) if size]
        options += [f"cap{self.soft_cap:g}"] if self.soft_cap else []
        sizes = (
            f"h{self.heads[0]}-{self.heads[1]}-d{self.head_size}-b{self.block_size}-s{self.reach}-q{self.query_tile}"
        )
        return "-".join([names.get(self.requests, "drawn"), sizes, *options, str(self.dtype).removeprefix("torch.")])


def key_ranges(most: int) -> st.SearchStrategy[KeyRange]:
    """Key ranges of every kind, with windows and chunks of up to ``most`` positions."""
    sizes = st.integers(1, most)
    back = sizes.map(lambda size: KeyRange(window=size)) | sizes.map(lambda size: KeyRange(chunk=size))
    return st.just(CAUSAL) | back | st.integers(0, most).map(lambda size: KeyRange(window=size, is_whole=True))


class Planned(NamedTuple):
    """A case, from the schedule to the metadata of attention."""

    metadata: PagedAttentionMetadata
    batch: InputBatch
    table: np.ndarray
    """[rows, blocks] of the cache tensor."""
    tokens: dict[int, tuple[int, int]]
    """(request, position) of every token, by its index in the step."""


@dataclass
class Step:
    """A case made real. T tokens and their padding."""

    query: torch.Tensor
    """[T, H, D]"""
    key: torch.Tensor
    value: torch.Tensor
    """[T, K, D]"""
    cache: torch.Tensor
    """Keys and values of earlier tokens; NaN in all other places but the null block."""
    metadata: PagedAttentionMetadata
    places: list[int]
    """[tokens that exist] the index of each in the step."""
    wanted: np.ndarray
    """[tokens that exist, H, D] float64"""


def plan_step(case: Case) -> Planned:
    """Plans requests in rows of the block table from the last on, with their blocks scattered over the cache."""
    bare, table, batch = _make_bare_step(case)
    longer = batch_of(
        batch.query_len + np.where(batch.query_len > 1, case.query_tile, 0),
        batch.num_computed + (0 if case.key_range.is_whole else case.decode.keys),
        batch.rows,
    )
    batches = [longer, batch] if case.padding else [batch]
    # With a window longer contexts may need fewer pairs.
    size = padded(bare.layout.limits, [bare.layout.needs(each)[0] for each in batches], case.padding)
    for each in batches:
        step = bare.send(each, size)
    call = bare.run(batch, step)
    tokens = {}
    for request, start in enumerate(batch.query_start.tolist()):
        for index in range(batch.query_len[request]):
            tokens[start + index] = request, int(batch.num_computed[request]) + index
    return Planned(call.metadata["layer"], batch, table.table, tokens)


def plan_padding(case: Case) -> PagedAttentionMetadata:
    """A step of nothing but padding, of a size that holds the case: as the runner warms up."""
    bare, _, batch = _make_bare_step(case)
    size = padded(bare.layout.limits, bare.layout.needs(batch), case.padding)
    bare.fill_padding(size)
    step = bare.packer.at(size)
    step.send()
    return bare.run(batch, step).metadata["layer"]


def _make_bare_step(case: Case) -> tuple[BareStep, BlockTable, InputBatch]:
    requests = sorted(case.requests, key=lambda request: request[1] > 1)
    computed, scheduled = (np.array(x, np.int64) for x in zip(*requests, strict=True))
    decode, chunk, stored = case.decode, case.chunk, case.stored
    # The limit is longer than the requests are.
    longest = int((computed + scheduled).max()) + decode.keys + chunk.query
    rows = np.arange(len(computed))[::-1].copy()
    blocks_per_tile = math.lcm(decode.keys // stored, chunk.keys // stored)
    table = BlockTable(len(computed), longest, stored, blocks_per_tile, case.block_size // stored)
    per_request = -(-longest // case.block_size)
    ids = np.random.default_rng(case.seed).permutation(len(computed) * per_request) + 1
    for row in rows:
        table.assign(row, ids[row * per_request :][:per_request].tolist())
    limits = StepLimits(10_000, 100, longest, decode, chunk, (*COMMON_DIMS, *plan_dims(decode, chunk)))
    caches = PagedCaches([AttentionGroup(["layer"], table, decode.keys, chunk.keys, case.key_range)], limits)
    bare = BareStep([caches], limits, len(computed), longest)
    bare.requests.num_known[:] = longest
    return bare, table, batch_of(scheduled, computed, rows)


def make_step(case: Case) -> Step:
    rng = np.random.default_rng(case.seed)
    (num_heads, num_kv_heads), head_size = case.heads, case.head_size
    metadata, batch, table, places = plan_step(case)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.uniform(-1, 1, shape)).to(case.dtype)

    history = [draw(length, 2 * num_kv_heads, head_size) for length in batch.seq_lens]
    cache = torch.full((int(table.max()) + 1, case.stored, 2 * num_kv_heads, head_size), float("nan"), dtype=case.dtype)
    cache[0] = 0.0
    for request, row in enumerate(batch.rows):
        count = batch.num_computed[request]
        seen = case.keys_seen(count, count + 1)[:-1]
        cache[table[row, seen // case.stored], seen % case.stored] = history[request][seen]
    tokens = len(metadata.slot_blocks)
    query = draw(tokens, num_heads, head_size) * 4
    new = torch.zeros(tokens, 2 * num_kv_heads, head_size, dtype=case.dtype)
    wanted = []
    for index, (request, position) in places.items():
        new[index] = history[request][position]
        seen = case.keys_seen(position, len(history[request]))
        lines = history[request][seen].double().numpy().reshape(-1, 2, num_kv_heads, head_size)
        keys, values = lines.transpose(1, 0, 2, 3)
        exact = query[index].double().numpy()
        wanted.append(dense_attention(exact, keys, values, len(seen) - 1, CAUSAL, case.soft_cap or None))
    key, value = new[:, :num_kv_heads], new[:, num_kv_heads:]
    return Step(query, key, value, cache, metadata, list(places), np.stack(wanted))
