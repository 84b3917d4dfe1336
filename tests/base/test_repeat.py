"""A step that repeats the last one: data on the device means the same as if the step were built from scratch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import first_key
from bare_step import BareStep, padded, scheduled
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from model_runner_base.attention.metadata import PairPlan
from model_runner_base.attention.plan import CAUSAL, FAN_IN, KeyRange, PairGeometry
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.batch import BatchBuilder, InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.graph_policy import SizeDoor
from model_runner_base.step.packing import Entries, PackedStep
from model_runner_base.step.repeat import make_repeat
from model_runner_base.step.request_states import BlockTable, ReceivedTokens, RequestInfo
from model_runner_base.step.schedule import Arrival, Schedule
from model_runner_base.step.sizes import COMMON_DIMS, StepLimits, StepSize, Tiling

MAX_LENGTH = 320
KEY_RANGES = [
    CAUSAL,
    *(KeyRange(window=width) for width in (1, 3, 9, 40)),
    *(KeyRange(chunk=size) for size in (1, 3, 16, 50)),
]


def pairs_below(plan: PairPlan, row: int) -> tuple[list[int], list[list[int]]]:
    """Pairs of a row in the order in which they are merged, and the widths of its nodes, from the tree's top."""
    widths, nodes = [], [row]
    neutrals = [len(plan.pair_tile) - 1, *(len(tree) - 1 for tree in plan.merge_tree)]
    for level in reversed(range(len(plan.merge_tree))):
        tree = plan.merge_tree[level]
        children = [[child for child in tree[node].tolist() if child != neutrals[level]] for node in nodes]
        widths.append([len(siblings) for siblings in children])
        nodes = [child for siblings in children for child in siblings]
    return nodes, widths


def merged_by_eights(num_pairs: int, num_levels: int) -> list[list[int]]:
    """Node widths over ``count`` pairs, from the top: every node is full but the last of its level."""
    widths: list[list[int]] = []
    count = num_pairs
    for _ in range(num_levels):
        nodes = -(-count // FAN_IN)
        widths.insert(0, [FAN_IN] * (nodes - 1) + [count - FAN_IN * (nodes - 1)])
        count = nodes
    return widths


def visible_keys(plan: PairPlan, position: int, pairs: list[int]) -> list[tuple[int, int]]:
    """(position, block id) of every key that a row sees in its pairs."""
    seen = []
    assert plan.pair_blocks is not None
    lasts = plan.last[pairs, 0].tolist()
    firsts = [0] * len(pairs) if plan.first is None else plan.first[pairs, 0].tolist()
    for first, last, blocks in zip(firsts, lasts, plan.pair_blocks[pairs].tolist(), strict=True):
        for key in range(max(0, first), min(plan.kv_tile - 1, last) + 1):
            seen.append((position - last + key, blocks[key // plan.block_size]))
    return seen


class Decoding:
    """Requests that decode, whose blocks come one by one; a step repeats the last one where ``Repeat`` says so.

    Another ``BareStep`` builds every step from scratch.
    """

    def __init__(
        self, key_ranges: list[KeyRange], block_size: int, blocks_per_tile: int, lengths: list[int], spare_pairs: int
    ) -> None:
        self.spare_pairs = spare_pairs
        tile = block_size * blocks_per_tile
        dims = (*COMMON_DIMS, *plan_dims(Tiling(1, tile), Tiling(64, tile)))
        self.limits = StepLimits(100, len(lengths) + 1, MAX_LENGTH, Tiling(1, tile), Tiling(64, tile), dims)
        tables = [BlockTable(len(lengths), MAX_LENGTH, block_size, blocks_per_tile) for _ in key_ranges]
        self.groups = [
            AttentionGroup([f"layer {index}"], table, tile, tile, key_range)
            for index, (table, key_range) in enumerate(zip(tables, key_ranges, strict=True))
        ]
        self.geometries = [
            PairGeometry(block_size, 1, tile, -(-MAX_LENGTH // tile), key_range) for key_range in key_ranges
        ]
        self.bare, self.scratch = (
            BareStep([PagedCaches(self.groups, self.limits)], self.limits, len(lengths), MAX_LENGTH) for _ in range(2)
        )
        self.names = [f"request {index}" for index in range(len(lengths))]
        self.tokens = {}
        for name, length in zip(self.names, lengths, strict=True):
            self.tokens[name] = list(range(1000, 1001 + length))
            for bare in (self.bare, self.scratch):
                info = RequestInfo(SamplingParams(), 0, self.tokens[name])
                bare.requests.admit(name, info, self.tokens[name], length)
        self.row_of = self.bare.requests.rows
        assert self.row_of == self.scratch.requests.rows
        rng = np.random.default_rng(0)
        order = rng.permutation(len(key_ranges) * len(lengths) * (MAX_LENGTH // block_size + 1)) + 1
        self.blocks: list[dict[str, list[int]]] = []
        """Blocks that each request will have in the end, for each table; a request is given them as it gets there."""
        for ids, table in zip(np.array_split(order, len(key_ranges)), tables, strict=True):
            shares = np.array_split(ids, len(lengths))
            self.blocks.append({name: share.tolist() for name, share in zip(self.names, shares, strict=True)})
            for name, length in zip(self.names, lengths, strict=True):
                table.assign(self.row_of[name], self.blocks[-1][name][: -(-length // block_size)])
        self.size: StepSize | None = None
        self.num_built = 0

    def step(self, names: list[str] | None = None) -> tuple[InputBatch, PackedStep, ModelCall]:
        """Decodes one more token of every request; checks all that the device makes of it."""
        names = names or self.names
        schedule = scheduled(dict.fromkeys(names, 1))
        for group, blocks in zip(self.groups, self.blocks, strict=True):
            size = group.block_table.block_size
            new = [name for name in names if not (len(self.tokens[name]) - 1) % size]
            ids = [[blocks[name][(len(self.tokens[name]) - 1) // size]] for name in new]
            if new:
                group.block_table.append([self.row_of[name] for name in new], ids)
        bare = self.bare
        before = bare.requests.num_computed.copy()
        prepared = bare.repeat.advance(schedule)
        if prepared is None:
            assert (bare.requests.num_computed == before).all(), "the step would be counted twice"
            prepared = self._build(bare, schedule)
            self.num_built += 1
        batch, packed = prepared
        assert batch.req_ids == names
        call = bare.run(batch, packed)
        np.testing.assert_array_equal(packed.on_device[:-1], packed.buffer[:-1], err_msg="the device lacks something")
        self._check(batch, call)
        again, built = self._build(self.scratch, schedule)
        other = self.scratch.run(again, built)
        self._compare(batch, call, again, other)
        if packed.is_whole or packed.entries.count[0]:
            self._compare_key_ranges(batch, call, again, other)
        drawn = np.random.default_rng(len(self.tokens[names[0]])).integers(0, 1 << 30, size=call.sample_slots.shape[1])
        bare.commit(call, drawn.tolist())
        self.scratch.commit(other, drawn.tolist())
        for name, token in zip(names, drawn.tolist(), strict=False):
            self.tokens[name].append(token)
        return batch, packed, call

    def _build(self, bare: BareStep, schedule: Schedule) -> tuple[InputBatch, PackedStep]:
        """Builds and sends a step, at the size of the step before if that holds it."""
        batch = BatchBuilder(bare.requests, bare.layout.order).build(schedule)
        needs = bare.layout.needs(batch)
        if self.size is None or not self.size.holds(needs[0]):
            assert bare is self.bare
            self.size = padded(self.limits, needs, padding=1, pairs=self.spare_pairs)
        return batch, bare.send(batch, self.size)

    def _check(self, batch: InputBatch, call: ModelCall) -> None:
        """Checks a step against the lists of every request's tokens and blocks."""
        fed, positions, (sample_rows, sample_positions) = (
            call.token_ids.tolist(),
            call.positions.tolist(),
            call.sample_slots.tolist(),
        )
        for index, name in enumerate(batch.req_ids):
            row, position = self.row_of[name], len(self.tokens[name]) - 1
            assert (fed[index], positions[index]) == (self.tokens[name][-1], position)
            assert (sample_rows[index], sample_positions[index]) == (row, position + 1)
            assert batch.rows[index] == row and self.bare.requests.num_computed[row] == position + 1
            assert batch.num_computed[index] == position and batch.seq_lens[index] == position + 1
            for group, geometry, blocks in zip(self.groups, self.geometries, self.blocks, strict=True):
                metadata, ids, block_size = call.metadata[group.layer_names[0]], blocks[name], geometry.block_size
                pairs, widths = pairs_below(metadata.decode, index)
                assert (metadata.decode.pair_tile[pairs] == index).all()
                seen = visible_keys(metadata.decode, position, pairs)
                first = first_key(group.key_range, position)
                wanted = [(key, ids[key // block_size]) for key in range(first, position + 1)]
                if group.key_range == CAUSAL:
                    assert seen == wanted
                    assert widths == merged_by_eights(len(pairs), geometry.num_levels)
                else:
                    assert sorted(seen) == wanted
                assert metadata.slot_blocks[index] == ids[position // block_size]
                assert metadata.slot_offsets[index] == position % block_size
        rest = slice(batch.num_reqs, None)
        assert not any(fed[rest] + positions[rest]), "padding moves"
        assert set(sample_rows[rest]) <= {self.bare.requests.max_num_reqs}
        for group in self.groups:
            metadata = call.metadata[group.layer_names[0]]
            assert metadata.decode.last[-1].max() < -MAX_LENGTH, "the neutral pair is seen"
            assert not metadata.slot_blocks[rest].any(), "padding is written outside the null block"

    def _compare(self, batch: InputBatch, call: ModelCall, again: InputBatch, built: ModelCall) -> None:
        """Compares a step with the same one built from scratch."""
        assert again.req_ids == batch.req_ids and again.rows.tolist() == batch.rows.tolist()
        assert torch.equal(call.token_ids, built.token_ids) and torch.equal(call.positions, built.positions)
        assert torch.equal(call.sample_slots, built.sample_slots)

    def _compare_key_ranges(self, batch: InputBatch, call: ModelCall, again: InputBatch, built: ModelCall) -> None:
        count = batch.num_reqs
        traces = self.bare.trace(call, batch), self.scratch.trace(built, again)
        for layer, trace in traces[0].items():
            assert trace.slots[:count].tolist() == traces[1][layer].slots[:count].tolist()
            for mine, its in zip(trace.seen[:count], traces[1][layer].seen[:count], strict=True):
                np.testing.assert_array_equal(mine.positions, its.positions)
                np.testing.assert_array_equal(mine.slots, its.slots)


@given(
    block_size=st.sampled_from([1, 2, 4]),
    blocks_per_tile=st.sampled_from([1, 2, 8]),
    key_ranges=st.lists(st.sampled_from(KEY_RANGES), min_size=1, max_size=2),
    lengths=st.lists(st.one_of(st.integers(0, 250), st.sampled_from([5, 31, 63])), min_size=1, max_size=8),
    steps=st.integers(1, 60),
    spare_pairs=st.integers(1, 40),
    interruptions=st.sets(st.integers(1, 60), max_size=2),
)
@settings(max_examples=examples(50), deadline=None)
def test_repeated_step_means_what_one_from_scratch_means(
    block_size: int,
    blocks_per_tile: int,
    key_ranges: list[KeyRange],
    lengths: list[int],
    steps: int,
    spare_pairs: int,
    interruptions: set[int],
) -> None:
    """A repeated step means what one from scratch means, also after a step in another order or of fewer requests."""
    decoding = Decoding(key_ranges, block_size, blocks_per_tile, lengths, spare_pairs)
    tile = block_size * blocks_per_tile
    names, last = decoding.names, None
    was_built = False
    kept: list[list[int]] = []
    """Largest number of pairs that each request has had since the step was built, for each group."""
    for step in range(1 + steps):
        before = names
        if step in interruptions:
            names = (names[1:] or names)[::-1]
        is_other = names != before
        num_built, size = decoding.num_built, decoding.size
        positions = [len(decoding.tokens[name]) - 1 for name in names]
        batch, packed, _ = decoding.step(names)
        is_built = decoding.num_built > num_built
        seen = [
            [position // tile - first_key(key_range, position) // tile + 1 for position in positions]
            for key_range in key_ranges
        ]
        # A pair is given up where another takes its place, and kept until then.
        kept = seen if is_other or not step else [list(map(max, *counts)) for counts in zip(kept, seen, strict=True)]
        if is_built:
            assert packed.is_whole and not batch.is_repeat
            if step and not is_other:
                num_pairs = decoding.limits.named(size)["decode_pairs"]  # type: ignore[arg-type]
                assert max(map(sum, kept)) >= num_pairs, "pairs were left"
            kept = seen
        else:
            assert not is_other and packed is last and batch.is_repeat
            # The first repeat says that the device knows the rest; later ones say what changed, if it is little.
            assert packed.is_whole == (was_built or packed.entries.count[0] > packed.entries.array.shape[1])
        was_built, last = is_built, packed


def test_a_repeat_sends_what_changed_and_nothing_else() -> None:
    """A request enters a block every fourth step, and a KV tile every eighth; those in between send nothing."""
    decoding = Decoding([CAUSAL], 4, 2, [2, 10], 40)
    counts = []
    for _ in range(20):
        _, packed, _ = decoding.step()
        counts.append(int(packed.entries.count[0]) if not packed.is_whole else None)
    assert decoding.num_built == 1 and counts[:2] == [None, None]
    # Both at once: a block's id in two places; at a KV tile also the pair's tile and start, its place in the tree.
    assert counts[2:] == [4, 0, 0, 0, 10, 0, 0, 0] * 2 + [4, 0]


def test_more_entries_than_fit_send_all_of_the_buffer() -> None:
    """A step with more changed entries than the list holds sends the whole buffer. None of them is sent again by the
    steps that follow."""
    decoding = Decoding([CAUSAL], 2, 2, [3] * 7 + [4, 5, 6], 300)
    whole = []
    for _ in range(40):
        _, packed, _ = decoding.step()
        whole.append(packed.is_whole)
    assert decoding.num_built == 1
    capacity = packed.entries.array.shape[1]
    assert 10 < capacity < 7 * 5 and whole[2:] == [step % 4 == 1 for step in range(2, 40)]


@given(st.lists(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 99)), max_size=12), min_size=1, max_size=12))
@settings(deadline=None)
def test_entries_name_no_place_that_has_not_changed(steps: list[list[tuple[int, int]]]) -> None:
    """Places are distinct within a step; six entries fit."""
    entries = Entries(21, capacity=6)
    for changes in steps:
        entries.clear()
        wanted = dict(changes)
        for place, value in wanted.items():
            if entries.count[0] < 6:
                entries.array[:, entries.count[0]] = place, value
            entries.count[0] += 1
        assert entries.count[0] == len(wanted)
        if len(wanted) > entries.capacity:
            entries.drop()
        elif wanted:
            entries.finish(len(wanted))
            pairs = [(place, value) for place, value in entries.array.T.tolist() if place != 20]
            assert len(pairs) == len(wanted) and dict(pairs) == wanted


def test_only_the_same_step_is_repeated() -> None:
    def moved_on() -> Decoding:
        """Two requests after two steps, of which the second repeats the first."""
        decoding = Decoding([CAUSAL], 4, 2, [2, 9], 40)
        first, *_ = decoding.step()
        again, *_ = decoding.step()
        assert again is first and decoding.bare.repeat.rows_of(decoding.names) == first.rows.tolist()
        return decoding

    one_each = {"request 0": 1, "request 1": 1}
    arrival = Arrival("request 1", [1, 2], 1, ([7],), None)
    others = {
        "another order": scheduled({"request 1": 1, "request 0": 1}),
        "one left": scheduled({"request 0": 1}),
        "more tokens": scheduled({"request 0": 1, "request 1": 2}),
        "a newcomer in place of one": replace(scheduled({"request 0": 1, "c": 1}), continued=["request 0"]),
        "one that resumes": replace(scheduled(one_each), arrivals=[arrival]),
    }
    for what, schedule in others.items():
        decoding = moved_on()
        before = decoding.bare.requests.num_computed.copy()
        assert decoding.bare.repeat.advance(schedule) is None, what
        assert (decoding.bare.requests.num_computed == before).all(), what
        assert decoding.bare.repeat.rows_of(["request 1", "request 0"]) is None
    decoding = moved_on()
    assert decoding.bare.repeat.advance(scheduled(one_each)) is not None
    decoding.bare.repeat.stop()
    assert decoding.bare.repeat.advance(scheduled(one_each)) is None


@pytest.mark.parametrize("counts", [{"request 0": 1, "request 1": 2}, {"request 0": 1, "request 1": 1}])
def test_a_step_that_leaves_a_prompt_unfinished_is_not_repeated(counts: dict[str, int]) -> None:
    decoding = Decoding([CAUSAL], 4, 2, [2, 9], 40)
    bare = decoding.bare
    bare.requests.num_known[bare.requests.rows["request 1"]] = 13
    batch = BatchBuilder(bare.requests, bare.layout.order).build(scheduled(counts))
    bare.send(batch, padded(decoding.limits, bare.layout.needs(batch), 1))
    assert bare.repeat.advance(scheduled({"request 0": 1, "request 1": 1})) is None


def test_steps_that_are_in_flight_in_turn_each_repeat() -> None:
    """Two batches in turn are each built once, also where one of them is built anew; a step with requests of both
    ends both."""
    decoding = Decoding([CAUSAL], 4, 2, [2, 9, 17, 5], 40)
    bare = decoding.bare
    bare.repeat = make_repeat(bare.requests, SizeDoor(lambda size: size), agrees=False, num_in_flight=2)
    first, second = decoding.names[:2], decoding.names[2:]
    decoding.step()  # The largest step: its size holds all others.
    for _ in range(10):
        batches = [decoding.step(names)[0] for names in (first, second)]
    assert decoding.num_built == 1 + 2 and all(batch.is_repeat for batch in batches)
    assert bare.repeat.rows_of(second) == [decoding.row_of[name] for name in second]
    for _ in range(3):
        batch, *_ = decoding.step(first[:1])
        assert decoding.step(second)[0].is_repeat, "the other step was forgotten"
    assert batch.is_repeat and decoding.num_built == 4
    for names in (decoding.names, first, second, first, second):
        decoding.step(names)
    assert decoding.num_built == 7
    bare.repeat.stop()
    assert bare.repeat.rows_of(first) is None


def test_a_step_repeats_only_at_the_size_that_ranks_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is packed at the larger size that another rank needs, and ranks are asked once a step, before it is
    sent."""
    decoding = Decoding([CAUSAL], 4, 2, [2, 9], 40)
    bare, asked, wanted = decoding.bare, list[StepSize](), list[StepSize]()

    def agree(size: StepSize) -> StepSize:
        asked.append(size)
        return wanted.pop() if wanted else size

    door = SizeDoor(agree)
    bare.repeat = make_repeat(bare.requests, door, agrees=True)
    for _ in range(4):
        decoding.step()
    size = decoding.size
    assert size is not None and decoding.num_built == 1 and asked == [size] * 3
    larger = padded(decoding.limits, [size], padding=1)
    wanted.append(larger)
    before = bare.requests.num_computed.copy()
    with monkeypatch.context() as patched:
        for send in ("send", "send_entries"):
            patched.setattr(PackedStep, send, lambda step: pytest.fail("the step is sent before it is asked for"))
        assert bare.repeat.advance(scheduled(dict.fromkeys(decoding.names, 1))) is None
    assert (bare.requests.num_computed == before).all(), "the step would be counted twice"
    assert door(size) == larger and len(asked) == 4
    assert door(size) == size and len(asked) == 5


def test_received_tokens_are_as_if_they_were_sampled_here() -> None:
    """Rows whose tokens were drawn elsewhere make the same steps, built or repeated."""
    decoding = Decoding([CAUSAL], 4, 2, [2, 9], 40)
    bare, device_ops = decoding.bare, DeviceOps(torch.device("cpu"))
    received = ReceivedTokens(bare.rows, lambda function, state: function, device_ops)

    def commit(call: ModelCall, tokens: list[int]) -> None:
        slots = call.sample_slots.numpy()
        received.record(slots[0], slots[1], np.array(tokens, np.int32))

    bare.commit = commit  # type: ignore[method-assign,assignment]
    for _ in range(12):
        decoding.step()
        for mine, its in zip(bare.rows.tensors, decoding.scratch.rows.tensors, strict=True):
            assert torch.equal(mine, its)
    assert decoding.num_built == 1


@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 999), max_size=4), min_size=3, max_size=3).filter(any), min_size=1, max_size=8
    ),
    st.sampled_from([1, 3]),
)
@settings(deadline=None)
def test_appended_blocks_follow_those_that_a_row_has(steps: list[list[list[int]]], parts: int) -> None:
    table = BlockTable(4, 256 * parts, 2, 1, parts)
    wanted: list[list[int]] = [[7], [], [8, 9], [5]]
    for row, ids in enumerate(wanted):
        table.assign(row, ids)
    table.has_changed[:] = False
    rows = [2, 0, 1]
    for step in steps:
        table.append(rows, step)
        for row, ids in zip(rows, step, strict=True):
            wanted[row] = wanted[row] + ids
    for row, ids in enumerate(wanted):
        stored = [block_id * parts + part for block_id in ids for part in range(parts)]
        assert table.table[row, : table.num_blocks[row]].tolist() == stored
    assert table.has_changed.tolist() == [True, True, True, False]
    before = table.table.copy()
    with pytest.raises(IndexError, match="more blocks than its row"):
        table.append([0], [[1] * (table.table.shape[1] // parts + 1)])
    assert (table.table == before).all()
