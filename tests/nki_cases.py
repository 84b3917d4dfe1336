"""One step of paged attention as the runner would make it, for the NKI kernels: metadata, cache, and what is right."""

from dataclasses import dataclass

import numpy as np
import torch
from test_attention import dense_attention, packed_at, tokens_of

from model_runner_base.attention.paged import PagedAttentionMetadata
from model_runner_base.attention.plan import PlanGeometry, kv_tile_for, stored_block_size
from model_runner_base.attention_metadata import AttentionGroup, PagedAttentionAdapter
from model_runner_base.block_tables import BlockTable
from model_runner_base.graph_policy import GraphSize, StepLimits
from model_runner_base.input_batch import InputBatch

DECODE = ((40, 1), (0, 1), (300, 1), (129, 1))
PREFILL = ((0, 70), (0, 5), (0, 130))
MIXED = ((37, 1), (0, 33), (200, 40), (512, 1), (64, 64), (5, 3))


@dataclass(frozen=True)
class Case:
    """``requests`` are (tokens computed, tokens scheduled); ``reach`` is about how many positions a KV tile has."""

    requests: tuple[tuple[int, int], ...] = MIXED
    heads: tuple[int, int] = (4, 2)
    head_size: int = 16
    block_size: int = 16
    reach: int = 128
    query_tile: int = 16
    window: int | None = None
    soft_cap: float = 0.0
    dtype: torch.dtype = torch.float32
    padding: int = 3
    seed: int = 0

    @property
    def stored(self) -> int:
        """Tokens in a block of the cache tensor."""
        return stored_block_size(self.block_size, self.reach)

    def __str__(self) -> str:
        kind = {DECODE: "decode", PREFILL: "prefill", MIXED: "mixed"}.get(self.requests, "drawn")
        options = [f"w{self.window}"] if self.window else []
        options += [f"cap{self.soft_cap:g}"] if self.soft_cap else []
        sizes = (
            f"h{self.heads[0]}-{self.heads[1]}-d{self.head_size}-b{self.block_size}-s{self.reach}-q{self.query_tile}"
        )
        return "-".join([kind, sizes, *options, str(self.dtype).removeprefix("torch.")])


@dataclass
class Step:
    """A case made real. T tokens and their padding."""

    query: torch.Tensor
    """[T, H, D]"""
    key: torch.Tensor
    value: torch.Tensor
    """[T, K, D]"""
    cache: torch.Tensor
    """NaN wherever no earlier token of a request is remembered, but for the null block."""
    metadata: PagedAttentionMetadata
    wanted: np.ndarray
    """[tokens that exist, H, D] float64"""


def make_batch(case: Case) -> tuple[PlanGeometry, BlockTable, InputBatch]:
    """Requests in rows of the block table from the last on, their blocks scattered over the cache."""
    computed, scheduled = (np.array(x, np.int64) for x in zip(*case.requests, strict=True))
    longest = int((computed + scheduled).max())
    kv_tile = kv_tile_for(case.block_size, case.reach)
    geometry = PlanGeometry(case.stored, kv_tile, -(-longest // kv_tile), case.window)
    rows = np.arange(len(computed))[::-1].copy()
    table = BlockTable(len(computed), longest, case.stored, kv_tile // case.stored, case.block_size // case.stored)
    per_request = -(-longest // case.block_size)
    ids = np.random.default_rng(case.seed).permutation(len(computed) * per_request) + 1
    for row in rows:
        table.assign(row, ids[row * per_request :][:per_request].tolist())
    batch = InputBatch(
        req_ids=[str(row) for row in rows],
        num_tokens=int(scheduled.sum()),
        rows=rows,
        query_len=scheduled,
        query_start=np.cumsum(scheduled) - scheduled,
        num_computed=computed,
        seq_lens=computed + scheduled,
        is_sampled=np.ones(len(rows), bool),
        num_sampled=len(rows),
    )
    return geometry, table, batch


def make_step(case: Case) -> Step:
    rng = np.random.default_rng(case.seed)
    (num_heads, num_kv_heads), head_size = case.heads, case.head_size
    geometry, table, batch = make_batch(case)
    metadata = plan_step(case, geometry, table, batch)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.uniform(-1, 1, shape)).to(case.dtype)

    history = {
        row: draw(length, 2 * num_kv_heads, head_size) for row, length in zip(batch.rows, batch.seq_lens, strict=True)
    }
    cache = torch.full(
        (int(table.table.max()) + 1, case.stored, 2 * num_kv_heads, head_size), float("nan"), dtype=case.dtype
    )
    cache[0] = 0.0
    for row, count in zip(batch.rows, batch.num_computed, strict=True):
        seen = np.arange(max(0, count - case.window + 1) if case.window else 0, count)
        cache[table.table[row, seen // case.stored], seen % case.stored] = history[row][seen]
    tokens = len(metadata.slot_blocks)
    query = draw(tokens, num_heads, head_size) * 4
    new = torch.zeros(tokens, 2 * num_kv_heads, head_size, dtype=case.dtype)
    wanted = []
    for token, (row, position) in enumerate(tokens_of(batch)):
        new[token] = history[row][position]
        keys, values = history[row].double().numpy().reshape(-1, 2, num_kv_heads, head_size).transpose(1, 0, 2, 3)
        exact = query[token].double().numpy()
        wanted.append(dense_attention(exact, keys, values, position, case.window, case.soft_cap or None))
    key, value = new[:, :num_kv_heads], new[:, num_kv_heads:]
    return Step(query, key, value, cache, metadata, np.stack(wanted))


def plan_step(case: Case, geometry: PlanGeometry, table: BlockTable, batch: InputBatch) -> PagedAttentionMetadata:
    """Planned, packed with ``case.padding`` spare tokens, tiles and pairs, and unpacked."""
    limits = StepLimits(10_000, 100, 10_000, max(case.query_tile, 2), geometry.kv_tile)
    adapter = PagedAttentionAdapter([AttentionGroup(["layer"], table, geometry)], limits)
    need = adapter.needed_sizes(batch, adapter.plan(batch))[0]
    tokens = need.num_tokens + case.padding
    tiles = tokens if need.query_tile == 1 else need.num_tiles + case.padding
    size = GraphSize(need.query_tile, tokens, tokens, tiles, need.num_pairs + case.padding)
    return packed_at(adapter, size, batch)
