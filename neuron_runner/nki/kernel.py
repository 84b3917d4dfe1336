"""Paged flash attention over the block-sparse plan, as NKI kernels. Not run on Neuron hardware.

A step has a plan of its decode rows and a plan of its chunks, and each has a kernel; both do the same with a pair
(``_attend``):

- ``attend_tiles``, for chunks: a tile's pairs are adjacent, so the running maximum, sum and output stay in SBUF while
  the tile's KV tiles stream by (FlashAttention, arXiv:2205.14135);
- ``attend_pairs``, for decode rows: pairs are independent, in any order, and their partial results are added up along
  the plan's merge tree (as in FlashDecoding), which a repeated step updates in place.

``query`` is [tokens * heads, D]. ``cache`` is the paged cache [blocks, block size, 2 * K, D] seen as [positions,
2 * K * D]: all heads of a position side by side, keys first. ``rows`` [P, S] names the cache row of each position of a
pair's KV tile, so one indirect DMA fills 128 partitions. ``bounds`` [P, rows of a pass] float32 is the last position
that each row sees. If it is twice as wide, its second half is the first position that each row sees; otherwise that
follows from ``window``, or is 0. Both tensors come from the plan (see operands.py). Maximum, sum and output are
float32, masked scores finite.

H query heads, K KV heads, D head size, Q query tile, S KV tile. Loop counters are opaque (dialect.py).
"""

from neuron_runner.nki import dialect as ops
from neuron_runner.nki.tiling import MAX_MOVING, PARTITIONS, heads_of_pass

MASK_VALUE = -1e30


def attend_tiles(
    query,
    cache,
    rows,
    bounds,
    queries,
    outputs,
    ranges,
    num_heads,
    num_kv_heads,
    query_tile,
    scale,
    window=0,
    soft_cap=0.0,
):
    """Attention of query tiles, each over its own pairs.

    Args:
        queries: [NT, H * Q] int32 rows of ``query``, pass after pass, by head and then query.
        outputs: [NT, H * Q] where each goes in the output; out of bounds for the padding of a tile.
        ranges: [NT, 2] int32 first pair of a tile, and the one after its last.

    Returns [tokens * heads, D]; rows that no tile names are not written.
    """
    head_size = query.shape[1]
    heads, kv_heads = heads_of_pass(num_heads, num_kv_heads, head_size, query_tile)
    passes, width = num_heads // heads, heads * query_tile
    out = ops.output(query.shape, query.dtype)
    consts = _constants(width, rows.shape[1], kv_heads, head_size)
    q = ops.sbuf((head_size, passes * kv_heads * width), query.dtype)
    ops.fill(q, 0.0)
    state = ops.sbuf((width, passes * (head_size + 2)), ops.float32)

    def tile_body(tile):
        _load_queries(q, query, queries, tile, passes, kv_heads, width)
        for index in range(passes):
            _reset(_pass_state(state, index, head_size), head_size)
        ends = ops.sbuf((1, 2), ops.int32)
        ops.load_row(ends, ranges, tile)

        def pair_body(pair):
            _attend(pair, q, cache, rows, bounds, state, consts, heads, kv_heads, num_kv_heads, scale, window, soft_cap)

        ops.loop(ops.load_scalar(ends[0:1, 0:1]), ops.load_scalar(ends[0:1, 1:2]), pair_body)
        for index in range(passes):
            place = ops.sbuf((width, 1), ops.int32)
            ops.load_row(place, outputs, tile, index * width)
            result = ops.sbuf((width, head_size), query.dtype)
            _normalise(result, _pass_state(state, index, head_size), head_size)
            ops.scatter(out, place, result)

    ops.loop(0, queries.shape[0], tile_body)
    return out


def attend_pairs(
    query,
    cache,
    rows,
    bounds,
    queries,
    tree,
    level_rows,
    num_heads,
    num_kv_heads,
    scale,
    window=0,
    soft_cap=0.0,
):
    """Attention of single queries: every pair on its own, then the merge tree.

    Args:
        queries: [P, H] int32 rows of ``query`` by pair.
        tree: [sum of level_rows, fan-in] int32: for each node and head of a level the rows of its children one level
            below; the levels one after the other, each filled up to a multiple of 128 rows.
        level_rows: rows of each level; the last is [tokens * heads] and its padding.

    Returns [rows of the last level, D].
    """
    head_size = query.shape[1]
    num_pairs = rows.shape[0]
    heads, kv_heads = heads_of_pass(num_heads, num_kv_heads, head_size, 1)
    passes = num_heads // heads
    partial = ops.scratch((num_pairs, num_heads * (head_size + 2)), ops.float32)
    consts = _constants(heads, rows.shape[1], kv_heads, head_size)
    q = ops.sbuf((head_size, passes * kv_heads * heads), query.dtype)
    ops.fill(q, 0.0)
    state = ops.sbuf((heads, passes * (head_size + 2)), ops.float32)

    def pair_body(pair):
        _load_queries(q, query, queries, pair, passes, kv_heads, heads)
        for index in range(passes):
            _reset(_pass_state(state, index, head_size), head_size)
        _attend(pair, q, cache, rows, bounds, state, consts, heads, kv_heads, num_kv_heads, scale, window, soft_cap)
        for index in range(passes):
            ops.store_row(partial, pair, _pass_state(state, index, head_size), index * heads * (head_size + 2))

    ops.loop(0, num_pairs, pair_body)

    nodes = partial.reshape((num_pairs * num_heads, head_size + 2))
    first = 0
    for level in range(len(level_rows)):
        is_last = level == len(level_rows) - 1
        if is_last:
            merged = ops.output((level_rows[level], head_size), query.dtype)
        else:
            merged = ops.scratch((level_rows[level], head_size + 2), ops.float32)
        _merge_level(merged, nodes, tree, first, head_size, is_last)
        nodes = merged
        first += level_rows[level]
    return nodes


# A state is [rows, D + 2] float32: the unnormalised output, the sum, the maximum.


def _pass_state(state, index, head_size):
    return state[:, index * (head_size + 2) : (index + 1) * (head_size + 2)]


def _reset(state, head_size):
    ops.fill(state[:, 0 : head_size + 1], 0.0)
    ops.fill(state[:, head_size + 1 : head_size + 2], MASK_VALUE)


def _normalise(result, state, head_size):
    # A tile without pairs is padding: its sum is 0.
    inverse = ops.sbuf((result.shape[0], 1), ops.float32)
    ops.at_least(inverse, state[:, head_size : head_size + 1], 1e-30)
    ops.reciprocal(inverse, inverse)
    ops.scale_rows(result, state[:, 0:head_size], inverse)


def _constants(width, kv_tile, kv_heads, head_size):
    """Positions of a KV tile [rows, S], and 1 where an output column belongs to a row's own KV head."""
    numbers = ops.sbuf((width, kv_tile), ops.int32)
    ops.count_up(numbers, [[1, kv_tile]], 0)
    positions = ops.sbuf((width, kv_tile), ops.float32)
    ops.copy(positions, numbers)
    own = ops.sbuf((width, kv_heads * head_size), ops.float32)
    if kv_heads > 1:
        # Row r belongs to KV head r // share: r - head * share lies in [0, share).
        share = width // kv_heads
        numbers = ops.sbuf((width, kv_heads * head_size), ops.int32)
        ops.count_up(numbers, [[-share, kv_heads], [0, head_size]], 1)
        distance = ops.sbuf((width, kv_heads * head_size), ops.float32)
        ops.copy(distance, numbers)
        ops.compare(own, distance, ops.greater_equal, 0.0, 1.0)
        ops.compare(distance, distance, ops.less, float(share), 1.0)
        ops.multiply(own, own, distance)
    return positions, own


def _load_queries(q, query, queries, row, passes, kv_heads, width):
    """A tile's queries, transposed: ``q`` [D, passes * kv_heads * rows], zero but where a row meets its own KV head."""
    head_size = query.shape[1]
    share = width // kv_heads
    for index in range(passes):
        place = ops.sbuf((width, 1), ops.int32)
        ops.load_row(place, queries, row, index * width)
        lines = ops.sbuf((width, head_size), query.dtype)
        ops.gather(lines, query, place)
        columns = ops.psum((head_size, width), query.dtype)
        ops.transpose(columns, lines)
        for head in range(kv_heads):
            first = (index * kv_heads + head) * width + head * share
            ops.copy(q[:, first : first + share], columns[:, head * share : (head + 1) * share])


def _attend(pair, q, cache, rows, bounds, state, consts, heads, kv_heads, num_kv_heads, scale, window, soft_cap):
    """Adds one pair to the state of every pass."""
    positions, own = consts
    head_size, kv_tile = q.shape[0], rows.shape[1]
    width = positions.shape[0]
    passes = q.shape[1] // (kv_heads * width)
    group = heads * passes // num_kv_heads
    cached, keys = _load_cache(pair, cache, rows, num_kv_heads, head_size)
    penalty = _penalty(pair, bounds, positions, window)
    line = cache.shape[1]

    for index in range(passes):
        pass_state = _pass_state(state, index, head_size)
        first_head = index * heads // group
        scores = ops.sbuf((width, kv_tile), ops.float32)
        for start in range(0, kv_tile, MAX_MOVING):
            size = min(MAX_MOVING, kv_tile - start)
            product = ops.psum((width, size), ops.float32)
            for head in range(kv_heads):
                column = (index * kv_heads + head) * width
                key = (first_head + head) * kv_tile + start
                ops.matmul(product, q[:, column : column + width], keys[:, key : key + size], head > 0)
            piece = scores[:, start : start + size]
            if soft_cap:
                ops.tanh(piece, product, scale / soft_cap)
                ops.scale_add(piece, piece, soft_cap, penalty[:, start : start + size])
            else:
                ops.scale_add(piece, product, scale, penalty[:, start : start + size])

        weights, correction = _soften(pass_state, scores, head_size, cache.dtype)
        _add_values(pass_state, weights, correction, cached, own, line, num_kv_heads + first_head, kv_heads, head_size)


def _load_cache(pair, cache, rows, num_kv_heads, head_size):
    """A KV tile, and its keys transposed.

    ``cached`` [128, chunks * 2 * K * D] holds position i * chunks + j in partition i, chunk j: so the row indices of a
    partition are contiguous. ``keys`` [D, K * S] has the positions in order again.
    """
    kv_tile, line = rows.shape[1], cache.shape[1]
    part = min(PARTITIONS, kv_tile)
    chunks = kv_tile // part
    place = ops.sbuf((part, chunks), ops.int32)
    ops.load_row(place, rows, pair)
    cached = ops.sbuf((part, chunks * line), cache.dtype)
    for chunk in range(chunks):
        ops.gather(cached[:, chunk * line : (chunk + 1) * line], cache, place[:, chunk : chunk + 1])
    keys = ops.sbuf((head_size, num_kv_heads * kv_tile), cache.dtype)
    for head in range(num_kv_heads):
        for chunk in range(chunks):
            first = chunk * line + head * head_size
            columns = ops.psum((head_size, part), cache.dtype)
            ops.transpose(columns, cached[:, first : first + head_size])
            ops.copy(ops.strided(keys, head * kv_tile + chunk, chunks, part), columns)
    return cached, keys


def _penalty(pair, bounds, positions, window):
    """A term to add to scores: MASK_VALUE or twice that where a row does not see a position, else 0."""
    width, kv_tile = positions.shape
    bound = ops.sbuf((width, 1), ops.float32)
    ops.load_row(bound, bounds, pair)
    penalty = ops.sbuf((width, kv_tile), ops.float32)
    ops.compare(penalty, positions, ops.greater, bound, MASK_VALUE)
    if window or bounds.shape[1] > width:
        if window:
            ops.add_constant(bound, bound, 1.0 - window)
        else:
            ops.load_row(bound, bounds, pair, width)
        behind = ops.sbuf((width, kv_tile), ops.float32)
        ops.compare(behind, positions, ops.less, bound, MASK_VALUE)
        ops.add(penalty, penalty, behind)
    return penalty


def _soften(state, scores, head_size, dtype):
    """The pair's weights, and the factor by which the output so far shrinks; updates the state's maximum and sum."""
    width, kv_tile = scores.shape
    total = state[:, head_size : head_size + 1]
    peak = state[:, head_size + 1 : head_size + 2]
    new_peak = ops.sbuf((width, 1), ops.float32)
    ops.row_max(new_peak, scores)
    ops.maximum(new_peak, new_peak, peak)
    negative = ops.sbuf((width, 1), ops.float32)
    ops.negate(negative, new_peak)
    weights = ops.sbuf((width, kv_tile), dtype)
    pair_total = ops.sbuf((width, 1), ops.float32)
    ops.exp_and_sum(weights, scores, negative, pair_total)
    correction = ops.sbuf((width, 1), ops.float32)
    ops.exp(correction, peak, negative)
    ops.scale_add(total, total, correction, pair_total)
    ops.copy(peak, new_peak)
    return weights, correction


def _add_values(state, weights, correction, cached, own, line, first_value, kv_heads, head_size):
    """output = output * correction + weights @ values, the values of ``kv_heads`` heads from ``first_value`` on."""
    width, kv_tile = weights.shape
    part = cached.shape[0]
    chunks = kv_tile // part
    batch = min(kv_heads, MAX_MOVING // head_size)
    starts = range(0, kv_heads, batch)
    sizes = [min(batch, kv_heads - start) for start in starts]
    products = [ops.psum((width, size * head_size), ops.float32) for size in sizes]
    for chunk in range(chunks):
        turned = ops.psum((part, width), weights.dtype)
        ops.transpose(turned, ops.strided(weights, chunk, chunks, part))
        stationary = ops.sbuf((part, width), weights.dtype)
        ops.copy(stationary, turned)
        for number in range(len(sizes)):
            first = chunk * line + (first_value + starts[number]) * head_size
            moving = cached[:, first : first + sizes[number] * head_size]
            ops.matmul(products[number], stationary, moving, chunk > 0)

    out = state[:, 0:head_size]
    ops.scale_rows(out, out, correction)
    for number in range(len(sizes)):
        product = products[number]
        if kv_heads > 1:
            first = starts[number] * head_size
            own_product = ops.sbuf(product.shape, ops.float32)
            ops.multiply(own_product, product, own[:, first : first + product.shape[1]])
            product = ops.sbuf((width, head_size), ops.float32)
            ops.add_groups(product, own_product, sizes[number])
        ops.add(out, out, product)


def _merge_level(merged, nodes, tree, first, head_size, is_last):
    """Rescales the children of a node to a common maximum and adds them; 128 rows of (node, head) at a time.

    ``first`` is the level's first row of ``tree``.
    """
    fan_in, size = tree.shape[1], head_size + 2

    def block_body(row):
        place = ops.sbuf((PARTITIONS, fan_in), ops.int32)
        ops.load_rows(place, tree, row, first)
        lines = ops.sbuf((PARTITIONS, fan_in * size), ops.float32)
        for child in range(fan_in):
            ops.gather(lines[:, child * size : (child + 1) * size], nodes, place[:, child : child + 1])
        peaks = ops.strided(lines, head_size + 1, size, fan_in)
        state = ops.sbuf((PARTITIONS, size), ops.float32)
        _reset(state, head_size)
        peak = state[:, head_size + 1 : head_size + 2]
        ops.row_max(peak, peaks)
        negative = ops.sbuf((PARTITIONS, 1), ops.float32)
        ops.negate(negative, peak)
        factors = ops.sbuf((PARTITIONS, fan_in), ops.float32)
        ops.exp(factors, peaks, negative)
        both = state[:, 0 : head_size + 1]
        for child in range(fan_in):
            line = lines[:, child * size : child * size + head_size + 1]
            ops.scale_add(both, line, factors[:, child : child + 1], both)
        if is_last:
            result = ops.sbuf((PARTITIONS, head_size), merged.dtype)
            _normalise(result, state, head_size)
            ops.store_rows(merged, row, result)
        else:
            ops.store_rows(merged, row, state)

    ops.loop(0, merged.shape[0], block_body, PARTITIONS)
