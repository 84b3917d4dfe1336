"""What a step must be, said by a model that remembers nothing: every array from each request's full list of tokens.

Loops and plain Python on purpose: the runner's own bookkeeping is incremental and vectorised, and shares no line with
this.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model_runner_base.attention.paged import PagedAttentionMetadata
from model_runner_base.graph_policy import GraphSize
from model_runner_base.input_batch import unpack
from model_runner_base.kv_cache import attention_layers
from model_runner_base.model_runner import ModelRunnerBase
from model_runner_base.testing.schedules import NULL_BLOCK, CacheGroup, Share


@dataclass
class SeenStep:
    """A step's packed arrays as they went to the device, and the last tokens that lay there."""

    size: GraphSize
    arrays: dict[str, np.ndarray]
    last_tokens: np.ndarray


@contextmanager
def watched_steps(runner: ModelRunnerBase) -> Iterator[list[SeenStep]]:
    """The steps that ``runner`` prepares inside the block, in a list that grows."""
    prepare = runner._prepare_inputs
    steps: list[SeenStep] = []

    def watched(scheduler_output: Any) -> Any:
        prepared = prepare(scheduler_output)
        _, packed = prepared
        assert packed.on_device is not None
        to_host = runner.device_ops.to_host
        arrays = unpack(torch.from_numpy(to_host(packed.on_device).copy()), packed.sections)
        last_tokens = to_host(runner.last_tokens[0]).copy()
        steps.append(SeenStep(packed.size, {name: array.numpy() for name, array in arrays.items()}, last_tokens))
        return prepared

    runner._prepare_inputs = watched  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del runner._prepare_inputs


def check_arrays(step: SeenStep, shares: list[Share], max_num_seqs: int) -> list[int]:
    """Compares what every step has, whatever its attention; returns the token ids that the model is fed."""
    arrays = step.arrays
    sources = arrays["token_sources"]
    fed = np.where(sources >= 0, step.last_tokens[sources], arrays["token_ids"]).tolist()
    rows = []
    token = 0
    for index, share in enumerate(shares):
        name = share.request.name
        for position in range(share.start, share.start + share.count):
            expected = share.tokens[position]
            assert expected is None or fed[token] == expected, (
                f"{name}: token {fed[token]} for {expected} at {position}"
            )
            assert arrays["positions"][token] == position, f"{name}: position {arrays['positions'][token]}"
            assert expected is not None or sources[token] >= 0, f"{name}: a token that the host cannot know yet"
            token += 1
        assert arrays["logits_indices"][index] == token - 1, f"{name}: logits of another token"
        row, slot_position = arrays["sample_rows"][index], arrays["sample_positions"][index]
        assert (row < max_num_seqs) == share.is_sampled, f"{name}: recorded {row < max_num_seqs}"
        assert slot_position == share.start + share.count, f"{name}: sampled for position {slot_position}"
        rows += [row] if share.is_sampled else []
    assert len(set(rows)) == len(rows), f"requests share a row: {rows}"
    assert (arrays["sample_rows"][len(shares) :] == max_num_seqs).all(), "padding records a token"
    return fed[:token]


def check_attention(step: SeenStep, shares: list[Share], runner: ModelRunnerBase, groups: list[CacheGroup]) -> None:
    """The attention metadata, taken apart, is a dense causal mask within the window, over the requests' own slots.

    It is worked out on the host from the buffer that lies on the device: what the device's own arithmetic makes of that
    buffer shows in its tokens. A device whose attention reads metadata of another kind is held to those alone.
    """
    arrays = {name: torch.from_numpy(array) for name, array in step.arrays.items()}
    layers = attention_layers(runner.vllm_config)
    metadata_of = runner.attention.build(step.size, arrays)
    done: set[tuple[int, int, int | None]] = set()
    for index, group in enumerate(groups):
        for name in group.layer_names:
            metadata, window = metadata_of[name], getattr(layers[name], "sliding_window", None)
            case = (id(metadata), index, window)
            if case not in done and isinstance(metadata, PagedAttentionMetadata):
                done.add(case)
                _check_metadata(metadata, shares, index, group.block_size, window)


def _check_metadata(
    metadata: PagedAttentionMetadata, shares: list[Share], group: int, block_size: int, window: int | None
) -> None:
    written = metadata.slot_blocks.numpy() * metadata.geometry.block_size + metadata.slot_offsets.numpy()
    tiles_per_line = block_size // metadata.geometry.block_size
    attended = _attended(metadata, sum(share.count for share in shares), window, tiles_per_line)
    token = 0
    for share in shares:
        slots = np.array(share.blocks[group]).repeat(block_size) * block_size
        slots += np.arange(len(slots)) % block_size
        for position in range(share.start, share.start + share.count):
            who = f"{share.request.name} at {position}"
            assert written[token] == slots[position], f"{who}: written to slot {written[token]}, not {slots[position]}"
            first = 0 if window is None else max(0, position - window + 1)
            distances, seen = next(attended)
            order = np.argsort(-distances)
            expected = np.arange(first, position + 1)
            np.testing.assert_array_equal(position - distances[order], expected, err_msg=f"{who}: sees")
            np.testing.assert_array_equal(seen[order], slots[expected], err_msg=f"{who}: sees in slots")
            token += 1
    assert (metadata.slot_blocks.numpy()[token:] == NULL_BLOCK).all(), "padding is written over a request's tokens"


def _attended(
    metadata: PagedAttentionMetadata, num_tokens: int, window: int | None, tiles_per_line: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each token: how far behind it lies what it sees, and the slot of each; as often as it is counted."""
    size = metadata.geometry.block_size
    offsets, last, pair_tile = (x.numpy() for x in (metadata.pair_offset, metadata.pair_last, metadata.pair_tile))
    tile_tokens = np.arange(num_tokens)[:, None] if metadata.tile_tokens is None else metadata.tile_tokens.numpy()
    if metadata.pair_blocks is None:
        # A cache line is a tile and its only pair; the null line comes before the first.
        lines = np.arange(len(offsets))
        blocks = (1 + lines[:, None]) * tiles_per_line + np.arange(metadata.line_tiles)
        tile_tokens, pair_tile = pair_tile[:, None], lines
    else:
        blocks = metadata.pair_blocks.numpy()
    position = np.arange(blocks.shape[1] * size)
    token_slots = np.arange(num_tokens) if metadata.token_slots is None else metadata.token_slots.numpy()
    query_tile = tile_tokens.shape[1]
    # From the leaves up: the pairs that each node of the merge tree adds up. Pairs that no query sees are neutral.
    nodes = [[pair] if offsets[pair] + query_tile > 0 else [] for pair in range(len(offsets))]
    for tree in metadata.merge_tree:
        nodes = [[pair for child in children for pair in nodes[child]] for children in tree.tolist()]
    for token in range(num_tokens):
        tile, index = divmod(int(token_slots[token]), query_tile)
        assert tile_tokens[tile, index] == token, f"token {token} is computed as token {tile_tokens[tile, index]}"
        in_tile = np.count_nonzero(token_slots[:num_tokens] // query_tile == tile)
        distances, slots = [], []
        for pair in nodes[tile]:
            assert pair_tile[pair] == tile, f"tile {tile} adds up a pair of tile {pair_tile[pair]}"
            assert last[pair] == offsets[pair] + in_tile - 1, "values behind the tile's last token are not silenced"
            distance = offsets[pair] + index - position
            visible = (distance >= 0) & (distance < (window or np.inf))
            distances.append(distance[visible])
            slots.append(blocks[pair, position[visible] // size] * size + position[visible] % size)
        yield np.concatenate(distances), np.concatenate(slots)
