"""Paged attention over a block-sparse plan, in plain torch.

The same code runs eagerly on any torch device and inside a compiled graph: shapes are static, the cache is written in
place, masked values are finite. Softmax and merging are in float32. A graph that is run operation by operation may hold
all of a layer's attention as one node (``AttentionNode``).

Shapes: P pairs, Q query tokens a tile, S KV tile, H heads, K KV heads, G = H / K, D head size of queries and keys, V
head size of values, which is D as a rule.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
)

from model_runner_base.attention.cache_format import CacheFormat, numbers_of
from model_runner_base.attention.metadata import PagedAttentionMetadata, PairPlan
from model_runner_base.attention.pieces import (
    MASK_VALUE,
    MAX_DIAGONAL_KV_HEADS,
    Partial,
    attend_in_pieces,
    exp,
    merge,
)
from model_runner_base.step.rounds import OneNode, is_capturing, is_read_at_once, is_traced


class NoBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Placeholder builder, from which vLLM derives others for chunked local and encoder-only attention.

    The base plans attention itself, so it raises NotImplementedError when it is made.
    """

    def __init__(self, *args: Any) -> None:
        raise NotImplementedError("attention in plain torch is planned by model_runner_base.caches, not by builders")

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        raise NotImplementedError


class PagedAttentionBackend(AttentionBackend):
    """Attention backend, as vLLM knows it, of every device that has no attention kernels of its own."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    reads_plans: ClassVar[bool] = True
    """Whether the base plans attention, so that the layers' ``impl`` has a ``cache_format``; else metadata builders of
    the backend plan it."""
    reads_lines: ClassVar[bool] = True
    """Whether decode may read whole lines of a contiguous cache (caches/contiguous.py)."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type["PagedAttentionImpl"]:
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return NoBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """vLLM's name of the layout of ``get_kv_cache_shape``. Only releases of vLLM that have ``KVCacheLayout`` ask
        for it."""
        interface: Any = kv_cache_interface
        return (interface.KVCacheLayout.LBNHC,)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return CacheFormat(num_kv_heads, head_size).shape(num_blocks, block_size)


def reads_plans(backend: type[AttentionBackend]) -> bool:
    """Whether the base plans the attention of ``backend``."""
    return getattr(backend, "reads_plans", False)


class PagedAttentionImpl(AttentionImpl[PagedAttentionMetadata]):
    """Attention of decoder layers, of encoder-only layers and of cross-attention layers. The plan says what is seen.

    Tokens of encoder-only layers also see later tokens; those of cross-attention layers see an encoder's output. Raises
    NotImplementedError for anything else that a layer asks for.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> None:
        refused = [name for name, value in unsupported.items() if value is not None]
        kind, is_causal = AttentionType(attn_type), attn_type == AttentionType.DECODER
        if kind == AttentionType.ENCODER:
            refused.append(f"{kind.value} attention")
        if not is_causal and alibi_slopes is not None:
            refused.append(f"{kind.value} attention with ALiBi")
        if refused:
            raise NotImplementedError(f"paged attention in plain torch does not support: {', '.join(refused)}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        # While vLLM makes a model, torch's default dtype is the model's.
        self.numbers = numbers_of(kv_cache_dtype, torch.get_default_dtype())
        self.cache_format = self.make_format()
        self.sliding_window = sliding_window if is_causal else None
        """Sliding window of a decoder layer; None for other layers, where only the plan says what is seen."""
        self.is_cross = kind == AttentionType.ENCODER_DECODER
        """Whether the keys are an encoder's output."""
        self.logits_soft_cap = logits_soft_cap
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._one_node = AttentionNode(self.attend, num_heads * self.value_size, [] if sinks is None else [sinks])

    @property
    def value_size(self) -> int:
        """Head size of values, and of what attention returns."""
        return self.head_size

    def make_format(self) -> CacheFormat:
        """Makes the format of the layer's cache."""
        return CacheFormat(self.num_kv_heads, self.head_size, self.numbers)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes keys and values to the cache, then attends. ``query`` [T, H * D], or [T, H, D]; returns [T, H * V].

        A layer that shares the cache of another does not write it, nor does a cross-attention layer, which is given no
        keys. Some releases of vLLM pass ``output``, and read it instead of the returned tensor. Without metadata, as in
        ``profile_step``, when there are no caches, it returns zeros.
        """
        if attn_metadata is None:
            return query.new_zeros(len(query), self.num_heads * self.value_size) if output is None else output.zero_()
        kv_cache = self.cache_format.view(kv_cache, attn_metadata.block_size)
        if self.kv_sharing_target_layer_name is None and key is not None and value is not None:
            self.cache_format.write(kv_cache, attn_metadata.slot_blocks, attn_metadata.slot_offsets, key, value)
        if output is None:
            return self._one_node(query, kv_cache, attn_metadata)
        return output.copy_(self._one_node(query.flatten(1), kv_cache, attn_metadata).view_as(output))

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: PagedAttentionMetadata
    ) -> torch.Tensor:
        """Attention over the cache, which holds the keys and values of the active tokens already. Takes [T, H * D], and
        returns [T, H * V].

        A device with a kernel of its own overrides this, or ``attend_decode`` and ``attend_chunks``. They may be one
        node of a captured graph, so they may read no tensors but their arguments and ``sinks``. The graph would not see
        new contents of any other weight.
        """
        num_rows, outputs = attn_metadata.num_decode_tokens, []
        if attn_metadata.decode is not None:
            outputs.append(self.attend_decode(query[:num_rows], kv_cache, attn_metadata.decode))
        if attn_metadata.chunks is not None:
            outputs.append(self.attend_chunks(query[num_rows:], kv_cache, attn_metadata.chunks))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    # ---- Decode rows: pairs' partial results, each added to its row's ----

    def attend_decode(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        """Attention of decode rows. Takes [rows, H * D], and returns [rows, H * V]."""
        is_diagonal = is_traced() and self.num_kv_heads <= MAX_DIAGONAL_KV_HEADS and plan.chosen is None
        attend = self._attend_diagonally if is_diagonal else self._attend_rows
        shape = self._tiles_shape(query.shape[0] // plan.last.shape[1], plan)
        if plan.pair_blocks is None:  # Each pair is a whole line of a contiguous cache.
            partial = attend(query, kv_cache, plan)
        elif plan.is_one_piece:
            partial = merge(attend(query, kv_cache, plan), plan.pair_tile, shape)
        else:
            partial = attend_in_pieces(attend, query, kv_cache, plan, shape)
        out = self._finish(partial, plan)
        return (out if plan.tile_slots is None else out[plan.tile_slots]).to(query.dtype)

    def _attend_rows(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> Partial:
        """Partial results of every pair, with rows' queries [rows, H * D]."""
        num_queries, kv_heads = plan.last.shape[1], self.num_kv_heads
        tiles = query.view(-1, num_queries, kv_heads, self.num_heads // kv_heads, self.head_size).transpose(1, 2)
        return self._attend_pairs(tiles.reshape(tiles.shape[0], kv_heads, -1, self.head_size), kv_cache, plan)

    def _attend_pairs(self, tiles: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> Partial:
        """Partial results of every pair, with query tiles [NT, K, Q * G, D]."""
        scores, visible, values = self._score(tiles[plan.pair_tile], kv_cache, plan)
        maximum = scores.amax(dim=-1, keepdim=True)
        weights = _weights(scores - maximum, visible)
        out = _zero_unseen_pairs(torch.matmul(weights, values), plan)
        return Partial(out, maximum, weights.sum(dim=-1, keepdim=True))

    def _attend_diagonally(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> Partial:
        """Does as ``_attend_rows`` in graphs, where KV heads are few.

        Each pair's keys and values stay the matrices [S, K * D] that the gather makes. Queries are laid out
        block-diagonally: zero except in the columns of their own KV head. Of the output only those columns are kept.
        """
        kv_heads, head_size = self.num_kv_heads, self.head_size
        group = self.num_heads // kv_heads
        num_queries = plan.last.shape[1]
        tiles = query.view(-1, num_queries, kv_heads, 1, group, head_size)[plan.pair_tile]
        own = torch.eye(kv_heads, dtype=query.dtype, device=query.device).view(1, 1, kv_heads, kv_heads, 1, 1)
        # [P, Q, K, K', G, D] -> [P, K' * D, K * Q * G]
        tiles = (tiles * own).permute(0, 3, 5, 2, 1, 4).reshape(-1, kv_heads * head_size, num_queries * self.num_heads)
        keys, values = (x.flatten(2) for x in self.cache_format.read(kv_cache, plan))

        position = torch.arange(keys.shape[1], dtype=torch.int32, device=query.device).view(1, -1)
        products = torch.matmul(keys.float(), tiles.float())
        first = None if plan.first is None else self._by_column(plan.first)
        slopes = self._slopes(query.device)
        if slopes is not None:
            slopes = slopes.view(kv_heads, 1, group).expand(-1, num_queries, -1).reshape(-1)
        scores, visible = self._mask(products, position.unsqueeze(-1), first, self._by_column(plan.last), slopes)

        maximum = scores.amax(dim=1, keepdim=True)
        weights = _weights(scores - maximum, visible)
        total = weights.sum(dim=1)
        out = torch.matmul(weights.transpose(1, 2), values.float())
        out = out.view(-1, kv_heads, num_queries * group, kv_heads, self.value_size)
        out = _zero_unseen_pairs(torch.stack([out[:, head, :, head] for head in range(kv_heads)], dim=1), plan)
        rows = (-1, kv_heads, num_queries * group, 1)
        return Partial(out, maximum.view(rows), total.view(rows))

    # ---- Chunk tiles: scores are taken relative to their tile's maximum, so partial outputs need only be added ----

    def attend_chunks(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        """Attention of chunks' tokens. Takes [C, H * D], and returns [C, H * V]."""
        assert plan.tile_tokens is not None and plan.tile_slots is not None
        kv_heads = self.num_kv_heads
        num_tiles, tile = plan.tile_tokens.shape
        tiles = query.view(-1, kv_heads, self.num_heads // kv_heads, self.head_size)[plan.tile_tokens.view(-1)]
        # [NT, Q, K, G, D] -> [NT, K, Q * G, D]
        tiles = tiles.view(num_tiles, tile, kv_heads, -1, self.head_size).transpose(1, 2)
        tiles = tiles.reshape(num_tiles, kv_heads, -1, self.head_size)
        if plan.is_one_piece:
            partial = self._attend_tiles(tiles, kv_cache, plan)
        else:
            shape = self._tiles_shape(num_tiles, plan)
            partial = attend_in_pieces(self._attend_pairs, tiles, kv_cache, plan, shape)
        return self._finish(partial, plan)[plan.tile_slots].to(query.dtype)

    def _attend_tiles(self, tiles: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan) -> Partial:
        """Results of query tiles [NT, K, Q * G, D].

        The maxima of scores are small tensors, so merging them by the tree costs next to nothing. Partial outputs are
        large, and are added up by one product with the matrix that says which pair is of which tile.
        """
        scores, visible, values = self._score(tiles[plan.pair_tile], kv_cache, plan)
        num_tiles, kv_heads, rows, _ = tiles.shape
        number = torch.arange(num_tiles, dtype=torch.int32, device=tiles.device).view(-1, 1)
        is_of = (number == plan.pair_tile.view(1, -1)).float()
        maximum = scores.amax(dim=3)
        for tree in plan.merge_tree:
            maximum = maximum[tree].amax(dim=1)
        # Back to the pairs by a product, not a gather: a compiler would take the maxima again for every score.
        reference = torch.matmul(is_of.t(), maximum.flatten(1)).view(-1, kv_heads, rows, 1)
        weights = _weights(scores - reference, visible)
        out = _zero_unseen_pairs(torch.matmul(weights, values), plan)
        out = torch.matmul(is_of, out.flatten(1)).view(num_tiles, kv_heads, rows, self.value_size)
        total = torch.matmul(is_of, weights.sum(dim=3).flatten(1)).view(num_tiles, kv_heads, rows, 1)
        return Partial(out, maximum.unsqueeze(3), total)

    # ---- Both ----

    def _tiles_shape(self, num_tiles: int, plan: PairPlan) -> tuple[int, ...]:
        """[NT, K, Q * G, V]"""
        rows = plan.last.shape[1] * self.num_heads // self.num_kv_heads
        return num_tiles, self.num_kv_heads, rows, self.value_size

    def _finish(self, partial: Partial, plan: PairPlan) -> torch.Tensor:
        """Outputs [NT * Q, H * V] of query tiles, from their sums over all keys."""
        out, maximum, total = partial
        if self.sinks is not None:
            scale, total = self._sink(maximum, total)
            out = out * scale
        # A padding row sees nothing: its sum is 0, and its output must stay finite.
        return self._by_token(out / total.clamp(min=1e-30), plan)

    def _by_token(self, rows: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        """[NT * Q, H * W] rows [NT, K, Q * G, W] of query tiles, token by token."""
        group = self.num_heads // self.num_kv_heads
        by_token = rows.view(-1, self.num_kv_heads, plan.last.shape[1], group, rows.shape[-1]).transpose(1, 2)
        return by_token.reshape(-1, self.num_heads * rows.shape[-1])

    def _score(
        self, tiles: torch.Tensor, kv_cache: torch.Tensor, plan: PairPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Scores and visibility [P, K, Q * G, S] of pairs' queries [P, K, Q * G, D], as ``_mask`` makes them, and the
        pairs' values [P, K, S, V] in float32."""
        group, query_tile = self.num_heads // self.num_kv_heads, plan.last.shape[1]
        keys, values = map(_by_head, self.cache_format.read(kv_cache, plan))
        position = torch.arange(keys.shape[2], dtype=torch.int32, device=tiles.device)

        products = torch.matmul(tiles.float(), keys.transpose(2, 3))
        slopes = self._slopes(tiles.device)
        if slopes is not None:
            slopes = self._of_heads(slopes, query_tile)
        first = None if plan.first is None else _by_query(plan.first, group)
        last = _by_query(plan.last, group)
        scores, visible = self._mask(products, position.view(1, 1, 1, -1), first, last, slopes)
        if plan.chosen is None:
            return scores, visible, values
        is_chosen = self._is_chosen(plan).unsqueeze(3).expand(-1, -1, -1, group, -1).reshape(scores.shape)
        visible = is_chosen.float() if visible is None else visible * is_chosen
        return torch.where(is_chosen, scores, MASK_VALUE), visible, values

    def _is_chosen(self, plan: PairPlan) -> torch.Tensor:
        """[P, K, Q, S] bool: which keys of each pair its queries chose (``plan.chosen``)."""
        raise NotImplementedError

    def _slopes(self, device: torch.device) -> torch.Tensor | None:
        """[H] float32 ALiBi slopes; float32 whatever the model's dtype, since distances are long."""
        slopes = self.alibi_slopes
        return None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device)

    def _mask(
        self,
        products: torch.Tensor,
        position: torch.Tensor,
        first: torch.Tensor | None,
        last: torch.Tensor,
        slopes: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores of products of queries and keys, all float32, and 1 for keys at ``position`` that are seen, else 0.

        Instead of the latter None if it is known that all are seen, as in most pairs of a long prompt: a mask takes a
        third of the time of a product.
        """
        scores = products * self.scale
        if self.logits_soft_cap:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        if slopes is not None:
            # The last key that a query sees is its own.
            scores = scores - slopes * (last - position)
        if first is None and is_read_at_once(last) and int(last.amin()) >= position.numel() - 1:
            return scores, None
        visible = position <= last
        if first is not None:
            visible = visible & (position >= first)
        return torch.where(visible, scores, MASK_VALUE), visible.float()

    def _by_column(self, x: torch.Tensor) -> torch.Tensor:
        """Expands one value for each query, [P, Q], to the columns of the diagonal layout, [P, 1, K * Q * G]."""
        num_queries = x.shape[1]
        if num_queries == 1:
            return x.unsqueeze(-1)
        shape = (-1, self.num_kv_heads, num_queries, self.num_heads // self.num_kv_heads)
        return x.view(-1, 1, num_queries, 1).expand(shape).reshape(x.shape[0], 1, -1)

    def _sink(self, maximum: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds each head's sink: a score that takes its share of the softmax and adds nothing to the output.

        Maximum and total are [NT, K, Q * G, 1]; returns the factor for outputs, and the new total.
        """
        assert self.sinks is not None
        tile = maximum.shape[2] * self.num_kv_heads // self.num_heads
        sinks = self._of_heads(self.sinks.float(), tile)
        new_max = torch.maximum(maximum, sinks)
        scale = exp(maximum - new_max)
        return scale, total * scale + exp(sinks - new_max)

    def _of_heads(self, values: torch.Tensor, tile: int) -> torch.Tensor:
        """Expands one value for each head, [H], to the rows of a tile, [1, K, Q * G, 1]."""
        values = values.view(1, self.num_kv_heads, 1, -1).expand(1, self.num_kv_heads, tile, -1)
        return values.reshape(1, self.num_kv_heads, -1, 1)


def _weights(scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Weights of keys, from scores relative to the largest; 0 for keys that are not ``visible``, None: all are."""
    weights = exp(scores)
    return weights if visible is None else weights * visible


def _by_query(x: torch.Tensor, group: int) -> torch.Tensor:
    """Expands one value for each query, [P, Q], to the rows of a tile, [P, 1, Q * G, 1]."""
    return x.unsqueeze(2).expand(-1, -1, group).reshape(x.shape[0], 1, -1, 1)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[P, K, S, D] in float32 of keys or values [P, S, K, D].

    Several heads are copied, once, so that each lies together; else a product would copy them transposed, which takes
    six times as long. A product reads a single head where it lies.
    """
    by_head = x.transpose(1, 2)
    if x.shape[2] == 1:
        return by_head.float()
    return by_head.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _zero_unseen_pairs(out: torch.Tensor, plan: PairPlan) -> torch.Tensor:
    """Outputs [P, K, Q * G, V] with 0 for pairs that see no key: those read arbitrary entries, which may be NaN."""
    if plan.pair_blocks is None:
        return out
    sees, first = plan.pair_last >= 0, plan.pair_first
    if first is not None:
        sees = sees & (first < plan.kv_tile)
    if is_read_at_once(sees) and bool(sees.all()):
        return out
    return out.masked_fill_(~sees.view(-1, 1, 1, 1), 0.0)


Attend = Callable[[torch.Tensor, torch.Tensor, PagedAttentionMetadata], torch.Tensor]
_PLAN_FIELDS = tuple(field.name for field in fields(PairPlan))


class AttentionNode:
    """Wrapper of a layer's ``attend``, which Dynamo takes for one operation inside ``functions_as_one_node``."""

    def __init__(self, attend: Attend, width: int, weights: list[torch.Tensor]) -> None:
        """Takes ``attend``, the ``width`` of its results, [T, width], and the ``weights`` that it reads."""

        def call(
            query: torch.Tensor,
            kv_cache: torch.Tensor,
            weights: list[torch.Tensor],  # Read by ``attend`` itself: named here, they are inputs of the graph.
            slots: list[torch.Tensor],
            num_decode_tokens: int,
            plans: list[dict[str, Any] | None],
        ) -> torch.Tensor:
            slot_blocks, slot_offsets = slots
            decode, chunks = (None if plan is None else PairPlan(**plan) for plan in plans)
            metadata = PagedAttentionMetadata(slot_blocks, slot_offsets, num_decode_tokens, decode, chunks)
            return attend(query, kv_cache, metadata)

        self._attend = attend
        self._weights = weights
        self._call = OneNode(call, lambda query: query.new_empty((query.shape[0], width)))

    def __call__(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: PagedAttentionMetadata) -> torch.Tensor:
        if not is_capturing():
            return self._attend(query, kv_cache, metadata)
        plans = [_as_dict(metadata.decode), _as_dict(metadata.chunks)]
        slots = [metadata.slot_blocks, metadata.slot_offsets]
        return self._call(query, kv_cache, self._weights, slots, metadata.num_decode_tokens, plans)


def _as_dict(plan: PairPlan | None) -> dict[str, Any] | None:
    return None if plan is None else {name: getattr(plan, name) for name in _PLAN_FIELDS}
