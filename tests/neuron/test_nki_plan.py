"""The plan as the NKI kernels read it, against brute force: which cache rows each token sees, in their geometry."""

from collections import Counter, defaultdict

import numpy as np
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from nki_cases import Case, Planned, key_ranges, plan_step

from model_runner_base.attention.metadata import PairPlan
from neuron_runner.nki.operands import decode_operands, tile_operands
from neuron_runner.nki.tiling import PARTITIONS, Tiling, heads_of_pass


@st.composite
def cases(draw: st.DrawFn, is_decode: bool) -> Case:
    block_size = draw(st.sampled_from([1, 5, 16, 128, 256]))
    key_range = draw(key_ranges(700))
    request = st.tuples(st.integers(0, 0 if key_range.is_whole else 900), st.integers(1, 1 if is_decode else 150))
    requests = draw(st.lists(request, min_size=1, max_size=4))
    if not is_decode and all(count == 1 for _, count in requests):
        requests.append((0, 2))
    reach = st.sampled_from([5, 125] if block_size == 5 else [block_size, 128, 512, 2048])
    return Case(
        requests=tuple(requests),
        heads=draw(st.sampled_from([(1, 1), (4, 2), (12, 3)])),
        head_size=1,
        block_size=block_size,
        # 1024 and 2048 are tiles for few KV heads; 5 is a block size that does not divide 128.
        reach=draw(reach),
        query_tile=draw(st.sampled_from([16, 100, 128])),
        key_range=key_range,
        padding=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 100)),
        chunk_reach=draw(st.none() | reach),
    )


def rows_seen(case: Case, planned: Planned) -> list[Counter]:
    """Cache rows that each token must see, once each."""
    _, batch, table, tokens = planned
    seen = []
    for request, position in tokens.values():
        keys, row = case.keys_seen(position, batch.seq_lens[request]), batch.rows[request]
        seen.append(Counter((table[row, keys // case.stored] * case.stored + keys % case.stored).tolist()))
    return seen


def visible(rows: np.ndarray, bounds: np.ndarray, row: int, width: int, window: int | None) -> list[int]:
    """Cache rows of one pair that a row of a pass sees, of ``width``."""
    position = np.arange(len(rows))
    is_seen = position <= bounds[row]
    if window:
        is_seen &= position > bounds[row] - window
    elif len(bounds) > width:
        is_seen &= position >= bounds[width + row]
    return rows[is_seen].tolist()


def check_tiles(case: Case, plan: PairPlan, wanted: list[Counter]) -> None:
    tiling = Tiling(*case.heads, case.head_size, *case.chunk, 4)
    operands = tile_operands(plan, tiling, case.window)
    rows, bounds, outputs = operands.rows.numpy(), operands.bounds.numpy(), operands.outputs.numpy()
    assert rows.shape[1] == case.chunk.keys
    num_heads, tile = case.heads[0], case.query_tile
    written: Counter = Counter()
    seen: dict[int, Counter] = defaultdict(Counter)
    for index, (first, last) in enumerate(operands.ranges.tolist()):
        tokens = set()
        for column, place in enumerate(outputs[index].tolist()):
            if place >= len(operands.is_token) * num_heads:
                continue
            written[place] += 1
            token, head = divmod(place, num_heads)
            tokens.add(token)
            assert head == column // tile, "a row of another head"
            assert operands.queries[index, column] == place
            if head == num_heads - 1:
                row = column % tiling.rows
                for pair in range(first, last):
                    seen[place].update(visible(rows[pair], bounds[pair], row, tiling.rows, case.window))
                assert seen[place] == wanted[token]
        own = {0}.union(*(wanted[token] for token in tokens))
        for pair in range(first, last):
            assert set(rows[pair].tolist()) <= own, "what is another request's is loaded"
    assert written == Counter(range(len(wanted) * num_heads))
    num_spare = len(operands.is_token) - len(wanted)
    assert num_spare >= case.padding
    assert operands.is_token.tolist() == [True] * len(wanted) + [False] * num_spare


def check_pairs(case: Case, plan: PairPlan, wanted: list[Counter]) -> None:
    tiling = Tiling(*case.heads, case.head_size, *case.decode, 4)
    operands = decode_operands(plan, tiling, case.window)
    rows, bounds = operands.rows.numpy(), operands.bounds.numpy()
    assert rows.shape[1] == case.decode.keys
    num_heads = case.heads[0]
    # Leaves are (pair, head); a pair that sees nothing is neutral.
    nodes = []
    for pair, queries in enumerate(operands.queries.tolist()):
        token = queries[0] // num_heads
        own = {0}.union(wanted[token] if token < len(wanted) else ())
        assert set(rows[pair].tolist()) <= own, "what is another request's is loaded"
        for head, query in enumerate(queries):
            seen = Counter(visible(rows[pair], bounds[pair], head % tiling.rows, tiling.rows, case.window))
            assert query % num_heads == head
            nodes.append(Counter({(query, row): count for row, count in seen.items()}))
    first = 0
    for size in operands.level_rows:
        assert size % PARTITIONS == 0
        nodes = [
            sum((nodes[child] for child in line), Counter()) for line in operands.tree[first : first + size].tolist()
        ]
        first += size
    for token, each in enumerate(wanted):
        for head in range(num_heads):
            place = token * num_heads + head
            assert nodes[place] == Counter({(place, row): count for row, count in each.items()})


@given(cases(is_decode=False))
@settings(max_examples=examples(40), deadline=None)
def test_tiles_see_exactly_their_context_beside_decode_rows(case: Case) -> None:
    planned = plan_step(case)
    wanted, rows = rows_seen(case, planned), planned.batch.num_decodes
    assert planned.metadata.decode is not None and planned.metadata.chunks is not None
    check_pairs(case, planned.metadata.decode, wanted[:rows])
    check_tiles(case, planned.metadata.chunks, wanted[rows:])


@given(cases(is_decode=True))
@settings(max_examples=examples(40), deadline=None)
def test_pairs_and_merge_tree_see_exactly_the_context(case: Case) -> None:
    planned = plan_step(case)
    assert planned.metadata.decode is not None and planned.metadata.chunks is None
    check_pairs(case, planned.metadata.decode, rows_seen(case, planned))


@given(st.integers(1, 64), st.integers(1, 16), st.sampled_from([8, 64, 128]), st.integers(1, PARTITIONS))
@settings(max_examples=examples(200), deadline=None)
def test_passes_fit_the_partitions_and_cover_the_heads(kv_heads: int, group: int, head_size: int, tile: int) -> None:
    heads, together = heads_of_pass(kv_heads * group, kv_heads, head_size, tile)
    assert heads * tile <= PARTITIONS and (kv_heads * group) % heads == 0
    # A pass has whole KV heads, or a share of one.
    assert heads == together * group or (together == 1 and group % heads == 0)
    assert together * head_size <= 1024
