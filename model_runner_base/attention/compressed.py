"""Attention to a sliding window and to compressed entries of the tokens before (DeepSeek V4), on plans of paged
attention.

A layer of rate r keeps an entry of every r tokens. It is a mixture of rows that the tokens leave, channel by channel:

    entry w = norm(sum over j of softmax_j(gate_j) * value_j),  rotated at position r w

The j are the r tokens from position r w on. With an overlap, a row has two values and two gates, and entry w also takes
the first ones of the r tokens before, and the second ones of its own. The token at position t sees the entries
w < (t + 1) // r: all of them, or those that an indexer chose, whose keys are compressed alike. It also sees keys of its
window. Both are under one softmax, with a sink.

Caches of several layers share a page, which is the memory of a block in one of vLLM's layers. All pages have one size,
and a cache is a slot in each page (``PageSlot``). Entries are in blocks of many tokens, kept for a whole request: the
entry of a token is at the token's place, divided by r. Keys of a window, and rows, are in blocks of few tokens, which
are freed as the window moves on. An entry is made in the step of its last token, and again if a step is repeated; until
then no token sees it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch.nn import functional as F
from vllm.v1.attention.backend import AttentionMetadata

from model_runner_base.attention.cache_format import CacheFormat
from model_runner_base.attention.choice import Chooser, KeyTable, is_chosen, padding_last, plan_of_chosen
from model_runner_base.attention.latent import LatentFormat
from model_runner_base.attention.metadata import NEVER, PagedAttentionMetadata, PairPlan
from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl
from model_runner_base.attention.pieces import Partial, attend_in_pieces, exp, merge
from model_runner_base.attention.plan import FAR
from model_runner_base.step.rounds import is_read_at_once

ENTRIES_AT_ONCE = 64
"""Number of entries in a KV tile."""


@dataclass(frozen=True)
class PageFormat(CacheFormat):
    """Format of pages that caches of several layers share: ``head_size`` numbers of the model's dtype a token."""

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, self.head_size)


class PageSlot(NamedTuple):
    """Part of a layer's pages that holds the rows of one cache."""

    size: int
    """Number of numbers in a row."""
    dtype: torch.dtype
    rows_per_block: int
    """Number of rows in a block."""
    slots: int
    """Number of caches that share a page, alike in the fields before."""
    slot: int
    """Number of the cache among these."""

    def rows(self, pages: torch.Tensor) -> torch.Tensor:
        """[rows, size] view of a layer's pages from the cache's first row on. Block b begins at its row
        ``b * slots * rows_per_block``."""
        return pages.view(-1).view(self.dtype).view(-1, self.size)[self.slot * self.rows_per_block :]


class CompressedBackend(PagedAttentionBackend):
    """Attention backend, as vLLM knows it, of the caches of layers with compressed entries, and of their windows."""

    reads_lines: ClassVar[bool] = False


@dataclass
class SlotTables:
    """Places of a group's tokens in caches of which so many share a page."""

    planned: PagedAttentionMetadata
    """Plans of the group, whose blocks are those of the caches."""
    rows: KeyTable | None
    """Table of the decode rows; None if there are none."""
    chunks: KeyTable | None
    """The same for tiles of chunks."""

    @property
    def places(self) -> torch.Tensor:
        """[T] place of each token among all places of the cache."""
        return self.planned.slot_blocks * self.planned.block_size + self.planned.slot_offsets


@dataclass
class CompressedMetadata(AttentionMetadata):
    """Plans of a step over a group's tokens, with tables of their places; shared by the group's layers.

    What follows from these, a rate and slots alone is made for the first layer that asks, and kept for the others.
    """

    group: int
    """Number of the group among those of a model's compressed caches."""
    planned: PagedAttentionMetadata
    rows: KeyTable | None
    """Table of the decode rows; None if there are none."""
    chunks: KeyTable | None
    """The same for tiles of chunks."""
    blocks_per_page: int
    """Number of the plan's blocks that are one of the scheduler's."""

    _tables: dict[int, SlotTables] = field(default_factory=dict)
    _windows: dict[tuple[int, ...], list["Windows"]] = field(default_factory=dict)
    _entries: dict[tuple[int, int], "EntryPlans"] = field(default_factory=dict)

    def tables(self, slots: int) -> SlotTables:
        """Tables and plans for caches of which ``slots`` share a page."""
        if slots not in self._tables:
            planned = self.planned
            rows = self._spread_table(self.rows, planned.decode, slots)
            chunks = self._spread_table(self.chunks, planned.chunks, slots)
            moved = PagedAttentionMetadata(
                self._spread(planned.slot_blocks, slots),
                planned.slot_offsets,
                planned.num_decode_tokens,
                None if rows is None else rows.plan,
                None if chunks is None else chunks.plan,
            )
            self._tables[slots] = SlotTables(moved, rows, chunks)
        return self._tables[slots]

    def _spread(self, blocks: torch.Tensor, slots: int) -> torch.Tensor:
        """Blocks counted over pages of ``slots`` caches each, in one of these caches."""
        count = self.blocks_per_page
        return blocks if slots == 1 else blocks // count * (count * slots) + blocks % count

    def _spread_table(self, table: KeyTable | None, plan: PairPlan | None, slots: int) -> KeyTable | None:
        if table is None or plan is None:
            return None
        assert plan.pair_blocks is not None
        plan = replace(plan, pair_blocks=self._spread(plan.pair_blocks, slots))
        return replace(table, blocks=self._spread(table.blocks, slots), plan=plan)

    def windows(
        self, slots: int, entries: "CompressedMetadata", entry_slots: int, rate: int, overlaps: bool
    ) -> list["Windows"]:
        """Windows of ``rate`` tokens that end in the step, of each table where it is not known that none does.

        ``entries`` is of the group that their entries are written to.
        """
        key = slots, entries.group, entry_slots, rate, int(overlaps)
        if key not in self._windows:
            own, theirs = self.tables(slots), entries.tables(entry_slots)
            pairs = (own.rows, theirs.rows), (own.chunks, theirs.chunks)
            made = [
                Windows.of(table, to.entries, rate, overlaps)
                for table, to in pairs
                if table is not None and to is not None
            ]
            self._windows[key] = [
                each for each in made if not is_read_at_once(each.is_real) or bool(each.is_real.any())
            ]
        return self._windows[key]

    def entries(self, slots: int, rate: int, max_model_len: int) -> "EntryPlans":
        """Plans over the entries of ``rate`` tokens, in caches of which ``slots`` share a page."""
        if (slots, rate) not in self._entries:
            self._entries[slots, rate] = EntryPlans.of(self.tables(slots), rate, max_model_len)
        return self._entries[slots, rate]


class Windows(NamedTuple):
    """Windows of tokens that end among the tokens of each query tile: N of NT tiles, and M tokens in each."""

    position: torch.Tensor
    """[NT, N] first position that an entry stands for; 0 if the window is not real."""
    is_real: torch.Tensor
    """[NT, N] bool: whether a token of the tile ends the window."""
    places: torch.Tensor
    """[NT, N, M] places of the tokens' rows."""
    is_token: torch.Tensor
    """[NT, N, M] bool: whether there is such a token."""
    entry: torch.Tensor
    """[NT, N] row of the entry in its cache; 0, in the null block, if the window is not real."""

    @classmethod
    def of(
        cls, table: KeyTable, entry_places: Callable[[torch.Tensor], torch.Tensor], rate: int, overlaps: bool
    ) -> "Windows":
        """Windows of ``rate`` tokens, preceded by as many more with an overlap.

        ``table`` has the places of rows. ``entry_places`` gives those of positions [NT, N] in the cache of entries.
        """
        first, last = table.last[:, :1], table.last.amax(dim=1, keepdim=True)
        device, num_windows = first.device, -(-table.last.shape[1] // rate)
        index = torch.arange(num_windows, dtype=torch.int32, device=device)
        position = (first.clamp(min=0) // rate + index) * rate
        is_real = (first >= 0) & (position + rate - 1 <= last)
        start, count = (-rate, 2 * rate) if overlaps else (0, rate)
        tokens = position.unsqueeze(2) + torch.arange(start, start + count, dtype=torch.int32, device=device)
        is_token = (tokens >= 0) & is_real.unsqueeze(2)
        tokens = torch.where(is_token, tokens, 0)
        places = table.entries(tokens.flatten(1)).view_as(tokens)
        entry = torch.where(is_real, entry_places(position) // rate, 0)
        position = torch.where(is_real, position, 0)
        return cls(position, is_real, places, is_token, entry)


class Compressor:
    """Compression of tokens' rows to entries of ``size`` numbers, one of ``rate`` tokens.

    ``overlaps`` says whether an entry also takes the ``rate`` tokens before.
    """

    def __init__(self, rate: int, size: int, overlaps: bool) -> None:
        self.rate, self.size, self.overlaps = rate, size, overlaps

    @property
    def row_size(self) -> int:
        """Number of numbers in a token's row: values, then gates, twice as many with an overlap."""
        return 2 * (1 + self.overlaps) * self.size

    def mixtures(self, windows: Windows, cache: torch.Tensor) -> torch.Tensor:
        """Mixtures [NT, N, size] of the rows in ``cache`` [places, row size] for windows that a step ends; those of
        windows that are not real are finite."""
        values, gates = cache[windows.places].chunk(2, dim=3)
        if self.overlaps:
            values, gates = (
                torch.cat((x[:, :, : self.rate, : self.size], x[:, :, self.rate :, self.size :]), dim=2)
                for x in (values, gates)
            )
        is_token = windows.is_token.unsqueeze(3)
        # Rows that nothing was written to may hold a NaN.
        values, gates = torch.where(is_token, values, 0.0), torch.where(is_token, gates, -torch.inf)
        gates = torch.where(windows.is_real[:, :, None, None], gates, 0.0)
        return (values * gates.softmax(dim=2)).sum(dim=2)


def table_of_entries(table: KeyTable, rate: int, max_model_len: int) -> KeyTable:
    """Table of the entries of ``rate`` tokens that the queries of each tile see, as keys in blocks of one."""
    plan, last = table.plan, table.last
    length = int(last.amax()) + 1 if is_read_at_once(last) else max_model_len
    width, device = max(1, length // rate), last.device
    size = min(ENTRIES_AT_ONCE, width)
    position = torch.arange(width, dtype=torch.int32, device=device)
    places = table.entries((position * rate).expand(len(last), -1)) // rate
    last = torch.where(last >= 0, (last + 1) // rate - 1, NEVER)
    tiles_of_keys = -(-width // size)
    pair = torch.arange(len(last) * tiles_of_keys, dtype=torch.int32, device=device)
    start = pair % tiles_of_keys * size
    order, is_pair = padding_last(start <= last.amax(dim=1)[pair // tiles_of_keys])
    tile, start = order // tiles_of_keys, order % tiles_of_keys * size
    blocks = F.pad(places, (0, -width % size)).view(-1, size)
    of_entries = replace(
        plan,
        block_size=1,
        kv_tile=size,
        pair_tile=tile,
        pair_start=torch.where(is_pair, start, FAR),
        pair_blocks=blocks[order],
        last=torch.where(is_pair.unsqueeze(1), last[tile] - start.unsqueeze(1), NEVER),
        merge_tree=[],
    )
    return KeyTable(places, last, of_entries)


class CompressedImpl(PagedAttentionImpl):
    """Attention with one row of ``head_size`` numbers as key and value, for all heads."""

    def make_format(self) -> CacheFormat:
        return LatentFormat(1, self.head_size, self.numbers, self.head_size)

    def _is_chosen(self, plan: PairPlan) -> torch.Tensor:
        return is_chosen(plan)

    def attend_both(
        self,
        query: torch.Tensor,
        window: PagedAttentionMetadata,
        keys: torch.Tensor,
        entries: PagedAttentionMetadata | None,
        compressed: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H * D] for queries [T, H * D], of the keys of a window, and of compressed entries if there are any.

        Args:
            window: plans of the window.
            keys: its cache, [blocks, block size, 1, D].
            entries: plans of entries, of the same tiles, or of single queries.
            compressed: their cache, [rows, 1, 1, D].
        """
        num_rows, outputs = window.num_decode_tokens, []
        for name, part in (("decode", query[:num_rows]), ("chunks", query[num_rows:])):
            plan: PairPlan | None = getattr(window, name)
            if plan is None:
                continue
            heads = part.view(-1, self.num_heads, self.head_size)
            if plan.tile_tokens is None:
                tiles = heads.view(-1, plan.last.shape[1], self.num_heads, self.head_size)
            else:
                tiles = heads[plan.tile_tokens]
            partial = self._partial(tiles, keys, plan)
            if entries is not None and compressed is not None:
                partial = _sum(partial, self._partial(tiles, compressed, getattr(entries, name)))
            out = self._finish(partial, plan)
            outputs.append((out if plan.tile_slots is None else out[plan.tile_slots]).to(query.dtype))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _partial(self, tiles: torch.Tensor, cache: torch.Tensor, plan: PairPlan) -> Partial:
        """Partial results of tiles [NT, Q, H, D]; the plan's tiles are these, or their single queries."""
        num_tiles, num_queries = tiles.shape[:2]
        of_plan = tiles.reshape(-1, 1, plan.last.shape[1] * self.num_heads, self.head_size)
        if plan.is_one_piece:
            partial = merge(self._attend_pairs(of_plan, cache, plan), plan.pair_tile, of_plan.shape)
        else:
            partial = attend_in_pieces(self._attend_pairs, of_plan, cache, plan, of_plan.shape)
        return Partial(*(x.view(num_tiles, 1, num_queries * self.num_heads, -1) for x in partial))


def _sum(one: Partial, other: Partial) -> Partial:
    """Partial results of the keys of two plans, for the same tiles."""
    maximum = torch.maximum(one.maximum, other.maximum)
    scales = exp(one.maximum - maximum), exp(other.maximum - maximum)
    out, total = (getattr(one, name) * scales[0] + getattr(other, name) * scales[1] for name in ("out", "total"))
    return Partial(out, maximum, total)


@dataclass
class EntryPlans:
    """Plans of a step over compressed entries."""

    rows: KeyTable | None
    chunks: KeyTable | None
    num_rows: int
    slots: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, step: SlotTables, rate: int, max_model_len: int) -> "EntryPlans":
        rows, chunks = (
            None if table is None else table_of_entries(table, rate, max_model_len)
            for table in (step.rows, step.chunks)
        )
        planned = step.planned
        return cls(rows, chunks, planned.num_decode_tokens, (planned.slot_blocks, planned.slot_offsets))

    def all(self) -> PagedAttentionMetadata:
        """Plans over all entries."""
        plans = [None if table is None else table.plan for table in (self.rows, self.chunks)]
        return PagedAttentionMetadata(*self.slots, self.num_rows, *plans)

    def chosen(
        self,
        chooser: Chooser,
        queries: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        of_keys: "EntryPlans",
    ) -> PagedAttentionMetadata:
        """Plans over the entries that an indexer chooses.

        ``queries`` [T, H, D], ``weights`` [T, H] float32, ``keys`` [rows, 1, 1, D]; ``of_keys`` are plans over the
        indexer's keys, which may be in other blocks.
        """
        plans = self.all()
        if self.rows is not None and of_keys.rows is not None:
            of_rows = [x[: self.num_rows].view(*self.rows.last.shape, *x.shape[1:]) for x in (queries, weights)]
            positions = chooser.choose(of_keys.rows, of_rows[0], of_rows[1], keys)
            if positions is not None:
                plans.decode = plan_of_chosen(self.rows, positions)
        if self.chunks is not None and of_keys.chunks is not None:
            assert plans.chunks is not None
            of_tiles = [x[self.num_rows :][plans.chunks.tile_tokens] for x in (queries, weights)]
            positions = chooser.choose(of_keys.chunks, of_tiles[0], of_tiles[1], keys)
            if positions is not None:
                plans.chunks = replace(plans.chunks, chosen=positions.sort(dim=2).values)
        return plans
