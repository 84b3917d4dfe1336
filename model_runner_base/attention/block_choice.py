"""Choice of whole blocks of keys, by an indexer's scores (MiniMax M3), on plans of paged attention.

An indexer has a query q_i of each token for each KV head i, and one key k of each position. A block of positions b has

    score_i(t, b) = max over s of block b, s <= t, of q_i(t) . k(s)

In KV head i a token sees the C blocks of the largest scores. The first blocks, and the last ones up to the token's own,
are always among them, as many as the model says. These blocks have nothing to do with those of the cache.

Scores are made in pieces of pairs, as attention is. They are held for all blocks of the longest row, a hundredth of its
positions: eagerly the step's longest row, in graphs the longest that the size's pairs allow. Attention then follows
plans of the same kind, with the chosen blocks as a mask. Where it works in pieces, pairs without a chosen block are
left out. So decode reads an indexer's key of every position, but keys and values of chosen blocks alone, where a loop
can end early: on the host, and in graphs with loops.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar

import torch

from model_runner_base.attention.choice import padding_last
from model_runner_base.attention.metadata import NEVER, PagedAttentionMetadata, PairPlan
from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl
from model_runner_base.attention.pieces import MASK_VALUE, run_pieces
from model_runner_base.attention.plan import FAR
from model_runner_base.step.rounds import State, is_read_at_once, is_traced


def longest_row(num_pairs: int, kv_tile: int, max_model_len: int) -> int:
    """Largest number of positions that a row may see in a plan of ``num_pairs`` pairs, all of which may be its own."""
    return min(max_model_len, num_pairs * kv_tile)


@dataclass(frozen=True)
class BlockChooser:
    """Choice of ``count`` blocks of ``size`` positions for each KV head of a token."""

    size: int
    count: int
    num_first: int
    """Number of blocks at the beginning that every token sees."""
    num_last: int
    """Number of blocks that every token sees, of which the last has the token."""
    max_model_len: int

    def choose(
        self, metadata: PagedAttentionMetadata, queries: torch.Tensor, cache: torch.Tensor
    ) -> PagedAttentionMetadata:
        """Returns a step's metadata with plans over the chosen blocks.

        Args:
            metadata: plans over all keys.
            queries: [T, K, D], decode rows before chunks.
            cache: [blocks, block size, 1, D], which holds the indexer's keys of the active tokens already.
        """
        num_rows, decode, chunks = metadata.num_decode_tokens, metadata.decode, metadata.chunks
        if decode is not None:
            of_rows = queries[:num_rows].view(-1, decode.last.shape[1], *queries.shape[1:])
            decode = self.plan_of_chosen(decode, of_rows, cache)
        if chunks is not None:
            chunks = self.plan_of_chosen(chunks, queries[num_rows:][chunks.tile_tokens], cache)
        return replace(metadata, decode=decode, chunks=chunks)

    def plan_of_chosen(self, plan: PairPlan, queries: torch.Tensor, cache: torch.Tensor) -> PairPlan:
        """Plan of the blocks that the indexer's queries [NT, Q, K, D] choose; ``plan`` itself if it is known that each
        sees all.

        In graphs it is known of sizes whose pairs are so few that no row can be longer.
        """
        assert plan.pair_start is not None and plan.first is None
        if is_read_at_once(plan.last):
            longest = plan.longest
        else:
            longest = longest_row(plan.pair_tile.shape[0], plan.kv_tile, self.max_model_len)
        if longest <= self.count * self.size:
            return plan
        num_blocks = -(-longest // self.size)
        chosen = self.best(self._scores(plan, queries, cache, num_blocks))
        plan = replace(plan, chosen=chosen)
        return plan if plan.is_one_piece else self._without_others(plan, num_blocks)

    def _scores(self, plan: PairPlan, queries: torch.Tensor, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """[NT, Q, K, blocks] float32 scores; ``MASK_VALUE`` for a block without a key that is seen."""
        num_tiles, num_queries, num_heads, _ = queries.shape
        width = num_blocks + 1  # The last one is that of padding.
        write = torch.Tensor.scatter_reduce if is_traced() else torch.Tensor.scatter_reduce_

        def add(state: State, part: PairPlan, reads: State) -> State:
            queries, cache = reads
            keys = cache.flatten(0, 2).index_select(0, part.entries).view(-1, part.kv_tile, cache.shape[-1])
            products = torch.matmul(queries[part.pair_tile].flatten(1, 2).float(), keys.float().transpose(1, 2))
            products = products.view(-1, num_queries, num_heads, part.kv_tile)
            position = torch.arange(part.kv_tile, dtype=torch.int32, device=cache.device)
            is_seen = position <= part.last.view(-1, num_queries, 1, 1)
            products = torch.where(is_seen, products, MASK_VALUE)
            of_segments = products.unflatten(3, (-1, gcd(part.kv_tile, self.size))).amax(dim=4)
            place = part.pair_tile.unsqueeze(1) * width + self.blocks_of(part).clamp(max=num_blocks)
            values = of_segments.permute(0, 3, 1, 2).flatten(0, 1).flatten(1)
            return (write(state[0], 0, place.view(-1, 1).long().expand_as(values), values, "amax"),)

        shape = num_tiles * width, num_queries * num_heads
        state = (torch.full(shape, MASK_VALUE, dtype=torch.float32, device=queries.device),)
        reads = queries, cache
        (scores,) = add(state, plan, reads) if plan.is_one_piece else run_pieces(add, state, reads, plan)
        scores = scores.view(num_tiles, width, num_queries, num_heads)[:, :-1]
        return scores.permute(0, 2, 3, 1)

    def best(self, scores: torch.Tensor) -> torch.Tensor:
        """[NT, Q, K, C] int32 numbers of the chosen blocks, -1 for none, by scores [NT, Q, K, blocks]."""
        is_seen = scores > MASK_VALUE
        number = torch.arange(scores.shape[3], dtype=torch.int32, device=scores.device)
        own = is_seen.sum(dim=3, keepdim=True) - 1
        is_always = is_seen & ((number < self.num_first) | (number > own - self.num_last))
        scores = torch.where(is_always, torch.inf, torch.where(is_seen, scores, -torch.inf))
        best = scores.topk(min(self.count, scores.shape[3]), dim=3, sorted=False)
        return torch.where(best.values > -torch.inf, best.indices, -1).int()

    def blocks_of(self, plan: PairPlan) -> torch.Tensor:
        """[P, N] int32 block of each segment of each pair's KV tile; for padding, one after all blocks.

        A segment is the largest number of positions that divides both a KV tile and a block.
        """
        assert plan.pair_start is not None
        segment = gcd(plan.kv_tile, self.size)
        start = torch.arange(0, plan.kv_tile, segment, dtype=torch.int32, device=plan.pair_start.device)
        return (plan.pair_start.unsqueeze(1) + start) // self.size

    def is_chosen(self, plan: PairPlan) -> torch.Tensor:
        """[P, Q, K, S] bool: which keys of each pair's KV tile lie in blocks that its queries chose."""
        assert plan.chosen is not None
        blocks = self.blocks_of(plan).view(len(plan.pair_tile), 1, 1, 1, -1)
        is_chosen = (plan.chosen[plan.pair_tile].unsqueeze(4) == blocks).any(dim=3)
        return is_chosen.repeat_interleave(gcd(plan.kv_tile, self.size), dim=3)

    def _without_others(self, plan: PairPlan, num_blocks: int) -> PairPlan:
        """The plan with the pairs first that have a chosen block of any of their queries; the others are padding."""
        assert plan.chosen is not None and plan.pair_start is not None and plan.pair_blocks is not None
        width, device = num_blocks + 1, plan.pair_tile.device
        tile = torch.arange(len(plan.chosen), dtype=torch.int32, device=device).view(-1, 1)
        chosen = torch.where(plan.chosen < 0, num_blocks, plan.chosen).flatten(1)
        is_wanted = torch.zeros(len(plan.chosen) * width, dtype=torch.bool, device=device)
        is_wanted = is_wanted.index_fill(0, (tile * width + chosen).flatten().long(), True)
        blocks = self.blocks_of(plan).clamp(max=num_blocks)
        is_kept = is_wanted[plan.pair_tile.unsqueeze(1) * width + blocks] & (blocks < num_blocks)
        is_kept = is_kept.any(dim=1)
        order, is_pair = padding_last(is_kept)
        return replace(
            plan,
            pair_tile=plan.pair_tile[order],
            pair_start=torch.where(is_pair, plan.pair_start[order], FAR),
            pair_blocks=plan.pair_blocks[order],
            last=torch.where(is_pair.unsqueeze(1), plan.last[order], NEVER),
            merge_tree=[],
        )


class BlockSparseBackend(PagedAttentionBackend):
    """Attention backend, as vLLM knows it, of a model with layers that see chosen blocks, and of their indexers' keys:
    one backend for all layers, so that they have one plan."""

    reads_lines: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type["BlockSparseImpl"]:
        return BlockSparseImpl


class BlockSparseImpl(PagedAttentionImpl):
    """Attention of each KV head to the blocks that were chosen for it; a plan without a choice sees all keys."""

    chooser: BlockChooser
    """Choice of the layer's own indexer, which the model sets after loading."""

    def _is_chosen(self, plan: PairPlan) -> torch.Tensor:
        return self.chooser.is_chosen(plan).transpose(1, 2)
