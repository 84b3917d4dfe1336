"""Choice of the keys that a token sees, by an indexer's scores (sparse attention, DSA), on plans of paged attention.

An indexer of H heads has queries q_h and weights w_h of each token t, and one key k of each position s:

    score(t, s) = sum over h of w_h(t) * relu(q_h(t) . k(s)),   s <= t

A token sees the C positions of the largest scores. One that has no more than C keys sees all of them, and nothing is
scored for it.

Scores of a long context are never held at once: rounds follow each other (step/rounds.py), each of which scores C
positions or somewhat more for some query tiles, and keeps the best C of these and of those before. So memory does not
depend on the context, apart from tables of block ids; shapes are static, and rounds end with the longest request. While
no token has more than C keys there are none. A graph that holds each round has few, of more tiles and positions: there
memory grows with the context.

Attention then follows plans of the same kind as before. Of decode rows a plan lists chosen keys, each query's as KV
tiles of its own, in blocks of one token: what is read does not depend on the context. Tokens of a chunk's tile choose
different keys, and together they often choose most. So its plan stays, and has the positions as a mask.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.nn import functional as F
from vllm.v1.attention.backend import AttentionMetadata

from model_runner_base.attention.metadata import NEVER, PagedAttentionMetadata, PairPlan
from model_runner_base.attention.pieces import MASK_VALUE
from model_runner_base.attention.plan import FAR
from model_runner_base.step.rounds import (
    MOST_UNROLLED,
    OneNode,
    State,
    is_read_at_once,
    is_traced,
    is_unrolled,
    run_rounds,
)

QUERIES_AT_ONCE = 64
"""Largest number of queries that a round scores, except for those of one query tile, and in graphs that hold each
round."""


class RoundSize(NamedTuple):
    """Size of a round of scores."""

    tiles: int
    """Number of query tiles."""
    positions: int
    """Number of positions: whole KV tiles, at least as many as are chosen."""

    @classmethod
    def of(
        cls, count: int, num_tiles: int, num_queries: int, longest: int, kv_tile: int, piece: int, is_unrolled: bool
    ) -> "RoundSize":
        """Size for ``num_tiles`` tiles of ``num_queries`` tokens that choose ``count`` of up to ``longest`` positions.

        ``kv_tile`` and ``piece`` are a plan's. ``is_unrolled`` is True in graphs that hold each round: there are at
        most ``MOST_UNROLLED`` then, whatever they take.
        """
        kv_tiles = -(-count // kv_tile)
        tiles = max(1, min(num_tiles, QUERIES_AT_ONCE // num_queries))
        if piece:
            # One query tile takes about the memory of a pair of attention, whose heads are larger.
            tiles = min(tiles, max(1, piece // kv_tiles))
        if is_unrolled:
            tiles = max(tiles, -(-num_tiles // MOST_UNROLLED))
            rounds_of_group = MOST_UNROLLED // -(-num_tiles // tiles)
            kv_tiles = max(kv_tiles, -(-longest // (kv_tile * rounds_of_group)))
        return cls(tiles, kv_tiles * kv_tile)


@dataclass
class KeyTable:
    """Places of the keys of each query tile's request, by position. A step makes it once from a plan.

    NT query tiles of Q tokens, M blocks of the longest request.
    """

    blocks: torch.Tensor
    """[NT, M] cache block of each block of positions; arbitrary where the request has no keys."""
    last: torch.Tensor
    """[NT, Q] last position that each query sees; ``NEVER`` if it is no token."""
    plan: PairPlan
    first_block: torch.Tensor | None = None
    """[NT, 1] number of the first block of positions in ``blocks``; None: 0 for all."""

    @classmethod
    def of(cls, plan: PairPlan, num_tiles: int, max_model_len: int) -> "KeyTable":
        """Makes the table of a causal plan; its pairs may be in any order, as repeated steps leave them."""
        assert plan.pair_start is not None and plan.pair_blocks is not None and plan.first is None
        num_pairs, width, device = plan.pair_tile.shape[0], -(-max_model_len // plan.kv_tile), plan.pair_tile.device
        kv_tile = plan.pair_start // plan.kv_tile
        # Padding pairs are FAR, after the end of every row.
        place = torch.where(kv_tile < width, plan.pair_tile * width + kv_tile, num_tiles * width)
        pair_at = torch.full((num_tiles * width + 1,), -1, dtype=torch.int32, device=device)
        pair_at = pair_at.index_put((place,), torch.arange(num_pairs, dtype=torch.int32, device=device))
        pair_at = pair_at[:-1].view(num_tiles, width)
        first = pair_at[:, :1]  # Every token sees its request's first key.
        pair_at = pair_at.clamp(min=0)
        last = torch.where(first < 0, NEVER, plan.last[pair_at[:, 0]])
        return cls(plan.pair_blocks[pair_at].flatten(1), last, plan)

    @classmethod
    def of_window(cls, plan: PairPlan, num_tiles: int, window: int) -> "KeyTable":
        """Makes the table of a plan whose queries see ``window`` positions, themselves among them: of these alone."""
        assert plan.pair_start is not None and plan.pair_blocks is not None
        num_pairs, num_queries, device = *plan.last.shape, plan.pair_tile.device
        is_pair = plan.pair_start < FAR
        # All pairs of a tile say the same.
        tile = torch.where(is_pair, plan.pair_tile, num_tiles)
        last = torch.full((num_tiles + 1, num_queries), NEVER, dtype=torch.int32, device=device)
        last = last.index_put((tile,), plan.last + plan.pair_start.unsqueeze(1))[:-1]
        last = torch.where(last >= 0, last, NEVER)
        first_tile = (last[:, 0] - (window - 1)).clamp(min=0) // plan.kv_tile
        width = (num_queries + window - 2) // plan.kv_tile + 2
        index = plan.pair_start // plan.kv_tile - first_tile[plan.pair_tile]
        place = torch.where(is_pair & (index >= 0) & (index < width), plan.pair_tile * width + index, num_tiles * width)
        pair_at = torch.zeros(num_tiles * width + 1, dtype=torch.int32, device=device)
        pair_at = pair_at.index_put((place,), torch.arange(num_pairs, dtype=torch.int32, device=device))
        blocks = plan.pair_blocks[pair_at[:-1].view(num_tiles, width)].flatten(1)
        return cls(blocks, last, plan, first_tile.unsqueeze(1) * (plan.kv_tile // plan.block_size))

    def entries(self, positions: torch.Tensor) -> torch.Tensor:
        """Entries of the cache that hold the keys at ``positions`` [NT, X] of each tile's request; arbitrary ones for
        positions outside of the table's, which no token sees. A table may have fewer than are chosen, where vLLM has
        lowered ``max_model_len`` to what fits."""
        size = self.plan.block_size
        block = positions // size
        if self.first_block is not None:
            block = (block - self.first_block).clamp(min=0)
        block = block.clamp(max=self.blocks.shape[1] - 1)
        return self.blocks.gather(1, block.long()) * size + positions % size


@dataclass
class SparseMetadata(AttentionMetadata):
    """Plans of a step over all keys, and the plans over chosen keys that the last indexer has left.

    A layer without an indexer of its own attends to what an earlier layer chose.
    """

    planned: PagedAttentionMetadata
    """Plans over all keys."""
    rows: KeyTable | None
    """Table of the decode rows; None if there are none."""
    chunks: KeyTable | None
    """The same for tiles of chunks."""
    left: list[PagedAttentionMetadata] = field(default_factory=list)
    """Plans over chosen keys that the step's indexers have left, in their order. Torch's Dynamo loses attributes that
    are set after a loop (2.14), but no items of a list."""


@dataclass
class ChosenMetadata(PagedAttentionMetadata):
    """Metadata whose plan of decode rows is in blocks of one token, whatever the cache's are."""

    cache_block_size: int = 0

    @property
    def block_size(self) -> int:
        return self.cache_block_size


class Chooser:
    """Choice of ``count`` keys a token, by an indexer's scores."""

    def __init__(self, count: int) -> None:
        self.count = count
        # A captured graph has one node, since the rounds are a loop, whose sizes are those of the step.
        self._positions = OneNode(self._choose, lambda last: last.new_empty((*last.shape, count)))

    def leave_choice(
        self, step: SparseMetadata, queries: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor
    ) -> None:
        """Chooses keys for each of a step's T tokens, and leaves the plans over them in its metadata.

        Args:
            step: metadata of the step.
            queries: [T, H, D], decode rows before chunks.
            weights: [T, H] float32.
            cache: [blocks, block size, 1, D], which holds the keys of the active tokens already.
        """
        planned = step.planned
        num_rows, decode, chunks = planned.num_decode_tokens, planned.decode, planned.chunks
        if step.rows is not None:
            of_rows = [x[:num_rows].view(*step.rows.last.shape, *x.shape[1:]) for x in (queries, weights)]
            positions = self.choose(step.rows, of_rows[0], of_rows[1], cache)
            decode = decode if positions is None else plan_of_chosen(step.rows, positions)
        if step.chunks is not None and chunks is not None:
            of_tiles = [x[num_rows:][chunks.tile_tokens] for x in (queries, weights)]
            positions = self.choose(step.chunks, of_tiles[0], of_tiles[1], cache)
            chunks = chunks if positions is None else replace(chunks, chosen=positions.sort(dim=2).values)
        slots = planned.slot_blocks, planned.slot_offsets
        step.left.append(ChosenMetadata(*slots, num_rows, decode, chunks, cache_block_size=planned.block_size))

    def choose(
        self, table: KeyTable, queries: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor | None:
        """[NT, Q, C] int32 positions of the keys that each query sees, for queries [NT, Q, H, D] weighted [NT, Q, H];
        None if it is known that each sees all.

        A query with fewer than C keys has positions 0 to C - 1; those after its own are not seen.
        """
        plan, last = table.plan, table.last
        if is_read_at_once(last) and int(last.amax()) < self.count:
            return None
        sizes = plan.block_size, plan.kv_tile, plan.piece, plan.pair_tile.shape[0]
        return self._positions(last, table.blocks, queries, weights, cache, *sizes)

    def _choose(
        self,
        last: torch.Tensor,
        blocks: torch.Tensor,
        queries: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        block_size: int,
        kv_tile: int,
        piece: int,
        num_pairs: int,
    ) -> torch.Tensor:
        """Chooses as ``choose`` does; the other arguments are a table's, and its plan's."""
        count, (num_tiles, num_queries) = self.count, last.shape
        longest = blocks.shape[1] * block_size
        at_once = RoundSize.of(count, num_tiles, num_queries, longest, kv_tile, piece, is_unrolled())
        tiles_at_once, size = at_once
        # The number of rounds of each group of tiles follows from its longest request.
        lengths = last.amax(dim=1) + 1
        lengths = F.pad(torch.where(lengths > count, lengths, 0), (0, -num_tiles % tiles_at_once))
        ends = ((lengths.view(-1, tiles_at_once).amax(dim=1) + (size - 1)) // size).cumsum(0, dtype=torch.int32)
        rounds, begins = ends[-1:].sum(dtype=torch.int32), F.pad(ends[:-1], (1, 0))
        num_groups = len(ends)
        most = num_groups * -(-longest // size)
        most = min(most, num_pairs * kv_tile // size + num_tiles)

        def body(number: torch.Tensor, state: State, reads: State) -> State:
            scores, positions = state
            queries, weights, cache, blocks, last, begins, ends = reads
            # A tensor [1], since Dynamo would read a scalar index.
            group = (ends <= number).sum(dtype=torch.int32).clamp(max=num_groups - 1).view(1)
            index = torch.arange(tiles_at_once, dtype=torch.int32, device=number.device)
            where = group * tiles_at_once + index
            tiles = where.clamp(max=num_tiles - 1)
            position = (number - begins[group]) * size + torch.arange(size, dtype=torch.int32, device=number.device)
            place = (position // block_size).clamp(max=blocks.shape[1] - 1)
            entries = blocks[tiles][:, place] * block_size + position % block_size
            keys = cache.flatten(0, 2).index_select(0, entries.flatten()).view(tiles_at_once, size, -1)
            products = torch.matmul(queries[tiles].flatten(1, 2).float(), keys.float().transpose(1, 2))
            products = torch.relu(products).view(tiles_at_once, num_queries, -1, size)
            new = torch.matmul(weights[tiles].unsqueeze(2), products).squeeze(2)
            # Places that are not seen may be another request's, even a NaN.
            new = torch.where(position <= last[tiles].unsqueeze(2), new, MASK_VALUE)
            best = torch.cat((scores[where], new), dim=2).topk(count, dim=2, sorted=False)
            both = torch.cat((positions[where], position.expand_as(new)), dim=2)
            write = torch.Tensor.index_copy if is_traced() else torch.Tensor.index_copy_
            where = where.long()
            return write(scores, 0, where, best.values), write(positions, 0, where, both.gather(2, best.indices))

        # Whole groups, so that no two places that a round writes are the same.
        shape = num_groups * tiles_at_once, num_queries, count
        scores = torch.full(shape, MASK_VALUE, dtype=torch.float32, device=last.device)
        state = scores, torch.zeros(shape, dtype=torch.int32, device=last.device)
        positions = run_rounds(rounds, most, body, state, (queries, weights, cache, blocks, last, begins, ends))[1]
        positions = positions[:num_tiles]
        first = torch.arange(count, dtype=torch.int32, device=last.device)
        return torch.where(last.unsqueeze(2) < count, first, positions)


def plan_of_chosen(table: KeyTable, positions: torch.Tensor) -> PairPlan:
    """Plan of decode rows over the keys at ``positions`` [NT, Q, C]: each query is a tile, with KV tiles of S of its
    keys.

    Pairs that a query does not fill are padding, which comes last.
    """
    plan, (num_tiles, num_queries, count) = table.plan, positions.shape
    size = min(plan.kv_tile, count)
    num_kv_tiles, num_tokens = -(-count // size), num_tiles * num_queries
    num_pairs, device = num_tokens * num_kv_tiles, positions.device
    entries = F.pad(table.entries(positions.flatten(1)).view(num_tokens, count), (0, -count % size)).view(-1, size)
    num_seen = (table.last.flatten() + 1).clamp(0, count)
    pair = torch.arange(num_pairs, dtype=torch.int32, device=device)
    is_pair = pair % num_kv_tiles * size < num_seen[pair // num_kv_tiles]
    order, is_pair = padding_last(is_pair)
    query, start = order // num_kv_tiles, order % num_kv_tiles * size
    return PairPlan(
        block_size=1,
        kv_tile=size,
        pair_tile=query,
        pair_start=torch.where(is_pair, start, FAR),
        pair_blocks=entries[order],
        last=torch.where(is_pair, num_seen[query] - 1 - start, NEVER).unsqueeze(1),
        first=None,
        merge_tree=[],
        piece=plan.piece,
    )


def is_chosen(plan: PairPlan) -> torch.Tensor:
    """[P, 1, Q, S] bool: which keys of each pair's KV tile are among the positions that its queries chose."""
    assert plan.chosen is not None and plan.pair_start is not None
    chosen, start, num_keys = plan.chosen[plan.pair_tile], plan.pair_start.view(-1, 1, 1), plan.kv_tile
    # At most S of the positions are the pair's own, and they follow each other.
    first = (chosen < start).sum(dim=2, keepdim=True)
    index = first + torch.arange(min(num_keys, chosen.shape[2]), device=first.device)
    place = chosen.gather(2, index.clamp(max=chosen.shape[2] - 1)) - start
    place = torch.where((place >= 0) & (place < num_keys), place, num_keys).long()
    of_keys = torch.zeros((*place.shape[:2], num_keys + 1), dtype=torch.bool, device=place.device)
    return of_keys.scatter(2, place, True)[..., :num_keys].unsqueeze(1)


def padding_last(is_pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Order in which pairs come before padding, [P] int32, and which places of it have a pair, [P] bool.

    ``is_pair`` [P] says which of the pairs are none. Pairs keep their order; places of padding have the last one.
    """
    num_pairs, device = len(is_pair), is_pair.device
    place = torch.where(is_pair, is_pair.cumsum(0, dtype=torch.int32) - 1, num_pairs)
    pair = torch.arange(num_pairs, dtype=torch.int32, device=device)
    order = torch.full((num_pairs + 1,), -1, dtype=torch.int32, device=device).index_put((place,), pair)[:-1]
    return torch.where(order >= 0, order, num_pairs - 1), order >= 0
