"""Estimate of the memory that the largest step needs in addition to weights and KV cache, from its shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import ModelConfig

from model_runner_base.attention.block_choice import longest_row
from model_runner_base.attention.choice import RoundSize
from model_runner_base.attention.pieces import PairShape
from model_runner_base.caches.pair_shapes import pair_shapes
from model_runner_base.inputs.embeddings import embeddings_memory
from model_runner_base.models.layers.fused_moe import GATHER_COST, MAX_DENSE_TOKENS, tiles_at_once
from model_runner_base.step.sizes import StepLimits, StepSize
from model_runner_base.vllm_compat.patches.without_indexer import hides_keys, num_indexed_keys
from model_runner_base.vllm_compat.probes.models import chooses_blocks, compression_rates
from model_runner_base.vllm_compat.types.kv_cache import is_of_encoder, layer_caches

SAMPLING_ARRAYS = 10
"""Number of arrays of the logits' shape that sampling holds at a time, the logits included."""


def estimate_step_memory(
    sizes: Sequence[StepSize],
    limits: StepLimits,
    specs: Mapping[str, Any],
    model_config: ModelConfig,
    gathers_cache: bool = True,
    is_unrolled: bool = False,
    num_replicas: int = 1,
) -> int:
    """An upper estimate in bytes of what one layer takes, or sampling after the last one, over all sizes; 0 if there
    are none.

    ``specs`` are what ``get_kv_cache_spec`` returns; ``limits`` are those that the sizes were made with.

    Counted in float32. Of a layer: the pairs that attention holds at a time, with what a query tile keeps between two
    pieces; a few hidden states and an MLP's two inner activations, what experts gather and compute; queries and outputs
    of latent attention; what an indexer's choice takes; the streams of hyper-connections; the logits, since those of
    the last step may still be there. Of sampling: hidden states, those of three more layers that a drafter may keep,
    logits, nine more arrays of their shape that penalties and a sampler with top-p make, and weights of a head with a
    dtype of its own. A pooling model has rows of hidden states for logits. In
    addition the token counts that penalties keep, and the pool of prompt embeddings, where they are enabled.

    ``gathers_cache`` is False where attention is a kernel, which makes neither tiles nor scores outside of itself. Then
    a result of each decode pair counts, and the operands of all pairs; a kernel may need less.
    ``is_unrolled`` is True where graphs hold each round of a loop (step/rounds.py), so that they are fewer and larger.
    ``num_replicas`` is the number of replicas that share experts, whose tokens each of them gathers.
    """
    hidden = model_config.get_hidden_size()
    inner = _largest(model_config, "intermediate_size") or 4 * hidden
    width = model_config.get_vocab_size() if limits.decodes else hidden
    if not sizes:
        return 0
    own, cross = _shapes(specs, limits, model_config)
    block_size = min([layer.spec.block_size for layer in layer_caches(specs).values()], default=1)
    worst, num_streams = 0, _largest(model_config, "hc_mult")
    # Where a head computes in another dtype, vLLM converts its weights in each step.
    head = hidden * width if limits.decodes and model_config.head_dtype != model_config.dtype else 0
    for size in sizes:
        layer = size.num_tokens * ((6 + 5 * num_streams) * hidden + 2 * inner) + size.num_logits * width
        gathered = num_replicas * size.num_tokens
        layer += _experts(model_config, gathered, is_unrolled) + (2 * gathered * hidden if num_replicas > 1 else 0)
        dims = limits.named(size)
        if hides_keys(model_config):
            choice = num_indexed_keys(model_config) or 0, limits.max_model_len
            layer += _choice(model_config, dims, limits, block_size, is_unrolled, *choice)
        if compression_rates(model_config):
            layer += _compression(model_config, dims, limits, block_size, is_unrolled)
        if chooses_blocks(model_config):
            layer += _choice_of_blocks(model_config, dims, limits, block_size)
        of_layer = [_attention(shape, dims, limits, gathers_cache) for shape in own]
        of_layer += [_attention(shape, dims | limits.cross_pairs(size), limits, gathers_cache) for shape in cross]
        sampling = 4 * size.num_tokens * hidden + SAMPLING_ARRAYS * size.num_logits * width + head
        worst = max(worst, 4 * (layer + max(of_layer, default=0)), 4 * sampling)
    counts = 4 * (limits.max_num_reqs + 1) * width if limits.decodes else 0
    return worst + counts + embeddings_memory(model_config, limits.max_num_tokens)


def _shapes(
    specs: Mapping[str, Any], limits: StepLimits, model_config: ModelConfig
) -> tuple[set[PairShape], set[PairShape]]:
    """Shapes of the layers' pairs, and of those of cross-attention layers.

    Where requests do not decode, layers may have no spec: they attend to the step's own keys, in a scratch cache.
    """
    layers = [layer.spec for layer in layer_caches(specs).values()]
    own, cross = ([spec for spec in layers if is_of_encoder(spec) == of_encoder] for of_encoder in (False, True))
    has_own = own or (not layers and not limits.decodes)
    return pair_shapes(own, model_config) if has_own else set(), pair_shapes(cross, model_config) if cross else set()


def _attention(shape: PairShape, dims: Mapping[str, int], limits: StepLimits, gathers_cache: bool) -> int:
    """Numbers that one layer's attention takes at a time, with decode rows and chunk tiles."""
    # A layer that keeps one row a token, of latents, has queries and outputs as long as the row.
    numbers = 2 * dims["tokens"] * shape.num_heads * shape.head_size if shape.num_halves == 1 else 0
    row, chunk = (limits.longest_row, limits.decode.keys, True), (limits.chunk.query, limits.chunk.keys, False)
    for pair, pairs, tiles, piece in (
        (row, dims["decode_pairs"], dims["decode_rows"], limits.decode_piece),
        (chunk, dims["chunk_pairs"], dims["chunk_tiles"], limits.chunk_piece),
    ):
        query, keys, is_decode = pair
        num_rows = query * shape.num_heads
        if not gathers_cache:
            # A tile's pairs follow each other, so a kernel adds up their results inside of itself; those of decode
            # rows are merged at its end. Operands: places of the keys, bounds for two heads' queries at a time.
            numbers += pairs * (keys + (2 * num_rows * shape.head_size if is_decode else 4 * query))
            numbers += 0 if is_decode else 2 * tiles * num_rows
            continue
        held = min(pairs, piece) if piece else pairs
        numbers += held * shape.numbers(*pair) + 3 * tiles * num_rows * shape.head_size
        if held < pairs or is_decode:
            numbers += tiles * held * (num_rows + 1)  # Which pair is of which tile, and the tiles' maxima in a piece.
    return numbers


def _choice(
    model_config: ModelConfig,
    dims: Mapping[str, int],
    limits: StepLimits,
    block_size: int,
    is_unrolled: bool,
    count: int,
    length: int,
) -> int:
    """Numbers that an indexer's choice of ``count`` keys, of up to ``length``, takes (attention/choice.py), with decode
    rows and chunk tiles.

    By query tile, the table of block ids, and the pairs that it is made of, with their int64 indices; by query, scores
    and places of the chosen keys, and entries of the cache; what one round takes; which keys of a piece's pairs tokens
    of chunks have chosen.
    """
    heads, size = _largest(model_config, "index_n_heads"), _largest(model_config, "index_head_dim")
    numbers = round_numbers = 0
    for query, keys, tiles, piece in (
        (limits.longest_row, limits.decode.keys, dims["decode_rows"], limits.decode_piece),
        (limits.chunk.query, limits.chunk.keys, dims["chunk_tiles"], limits.chunk_piece),
    ):
        if not tiles:
            continue
        numbers += tiles * (2 * -(-length // min(block_size, keys)) + 6 * -(-length // keys) + 6 * query * count)
        at_once = RoundSize.of(count, tiles, query, length, keys, piece, is_unrolled)
        # Keys are gathered and converted, and so are the entries that they are gathered from.
        of_tile = at_once.positions * (2 * size + 3)
        # Queries, products with keys before and after relu, scores before and after the mask, both lists of the best.
        of_tile += query * (2 * heads * (size + at_once.positions) + 4 * at_once.positions + 6 * count)
        round_numbers = max(round_numbers, at_once.tiles * of_tile)
    pairs = min(dims["chunk_pairs"], limits.chunk_piece or dims["chunk_pairs"])
    return numbers + round_numbers + pairs * limits.chunk.query * (2 * count + 6 * limits.chunk.keys)


def _compression(
    model_config: ModelConfig, dims: Mapping[str, int], limits: StepLimits, block_size: int, is_unrolled: bool
) -> int:
    """Numbers that compressed entries take beside attention (attention/compressed.py), with rows and chunk tiles.

    By query tile, tables of places of blocks and of entries, with the pairs of these; partial results over both; rows
    of the windows that end in a tile, before and after the mask, with their weights.
    """
    config = model_config.hf_text_config
    rates, size, heads = compression_rates(model_config), config.head_dim, config.num_attention_heads
    length = limits.max_model_len // min(rates)
    tables = 2 * -(-limits.max_model_len // block_size) + 6 * length
    numbers = 0
    for query, tiles in (
        (limits.longest_row, dims["decode_rows"]),
        (limits.chunk.query, dims["chunk_tiles"]),
    ):
        read = max(-(-query // rate) * 2 * rate for rate in rates)
        numbers += tiles * (tables + 8 * read * 2 * size + 3 * query * heads * size)
    return numbers + _choice(model_config, dims, limits, 1, is_unrolled, config.index_topk, length)


def _choice_of_blocks(model_config: ModelConfig, dims: Mapping[str, int], limits: StepLimits, block_size: int) -> int:
    """Numbers that a choice of blocks takes (attention/block_choice.py), with decode rows and chunk tiles.

    By query and KV head, scores of the longest row's blocks: the state before and after a piece, and their copies with
    and without the blocks that are always seen, for the best. Of the pairs that attention holds, which keys were
    chosen.
    """
    settings = model_config.hf_text_config.sparse_attention_config
    heads, num_heads = settings["sparse_num_index_heads"], _largest(model_config, "num_attention_heads")
    numbers = 0
    for query, keys, tiles, pairs, piece in (
        (limits.longest_row, limits.decode.keys, dims["decode_rows"], dims["decode_pairs"], limits.decode_piece),
        (limits.chunk.query, limits.chunk.keys, dims["chunk_tiles"], dims["chunk_pairs"], limits.chunk_piece),
    ):
        held = min(pairs, piece) if piece else pairs
        longest = longest_row(pairs, max(keys, block_size), limits.max_model_len)
        num_blocks = -(-longest // settings["sparse_block_size"]) + 1
        numbers += 5 * tiles * query * heads * num_blocks + 2 * held * query * num_heads * keys
    return numbers


def _experts(model_config: ModelConfig, num_tokens: int, is_unrolled: bool) -> int:
    """Numbers that a mixture-of-experts layer holds at a time, in the costlier of its ways
    (models/layers/fused_moe.py)."""
    num_experts = model_config.get_num_experts()
    if not num_experts:
        return 0
    hidden = model_config.get_hidden_size()
    inner = _largest(model_config, "moe_intermediate_size") or _largest(model_config, "intermediate_size") or 4 * hidden
    row, expert = 2 * hidden + 3 * inner, 3 * hidden * inner
    if num_tokens <= MAX_DENSE_TOKENS:
        gathered = tiles_at_once(num_experts // GATHER_COST, 4 * expert, is_unrolled)
        return max(num_experts * num_tokens * row, gathered * expert)
    top_k = _largest(model_config, "num_experts_per_tok") or num_experts
    gathered = tiles_at_once(2 * num_experts, 4 * expert, is_unrolled)
    # Rows of the tiles, before and after; those of the choices again, with and without what is left out.
    return gathered * expert + num_tokens * top_k * (2 * row + hidden)


def _largest(model_config: ModelConfig, name: str) -> int:
    """Size from the model's own config, the largest one if each layer has its own; 0 if there is none."""
    value = getattr(model_config.hf_text_config, name, None) or 0
    return max(value) if isinstance(value, list | tuple) else value
