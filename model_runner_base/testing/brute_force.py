"""Expected contents of a step, by a model that keeps no state: it works from each request's full list of tokens.

Loops and plain Python on purpose: the runner's own bookkeeping is incremental and vectorised, and shares no line with
this. Steps are compared request by request, so neither the order of a batch nor its buffers matter.
"""

from typing import Any

import numpy as np

from model_runner_base.step.trace import RequestTrace, StepTrace
from model_runner_base.testing.schedules import CacheGroup, Sees, Share, seen_keys


def check_step(step: StepTrace, shares: list[Share], max_num_seqs: int, groups: list[CacheGroup]) -> None:
    """Compares tokens, positions, sampled places, and for each layer the slots written and the keys seen."""
    assert set(step.requests) == {share.request.name for share in shares}
    for share in shares:
        request = step.requests[share.request.name]
        _check_tokens(request, share, max_num_seqs)
        _check_attention(request, share, groups)
    rows = [step.requests[share.request.name].sampled.row for share in shares if share.is_sampled]
    assert len(set(rows)) == len(rows), f"requests share a row: {rows}"
    assert (step.padding_rows == max_num_seqs).all(), "padding records a token"
    for name, slots in step.padding_slots.items():
        sizes = {group.block_size for group in groups if name in group.layers}
        assert all((slots < size).all() for size in sizes), f"padding is written over a request's tokens in {name}"


def _check_tokens(request: RequestTrace, share: Share, max_num_seqs: int) -> None:
    name = share.request.name
    assert request.positions == list(range(share.start, share.start + share.count)), f"{name}: {request.positions}"
    for position, fed in zip(request.positions, request.token_ids, strict=True):
        expected = share.tokens[position]
        assert expected is None or fed == expected, f"{name}: token {fed} for {expected} at {position}"
    assert request.sampled.token == share.count - 1, f"{name}: logits of another token"
    is_recorded = request.sampled.row < max_num_seqs
    assert is_recorded == share.is_sampled, f"{name}: recorded {is_recorded}"
    assert request.sampled.position == share.start + share.count, f"{name}: for position {request.sampled.position}"


def _check_attention(request: RequestTrace, share: Share, groups: list[CacheGroup]) -> None:
    """Compares the slots written and the keys seen with a dense causal mask over the request's own slots.

    Keys are left out where a backend's metadata do not show them.
    """
    for index, group in enumerate(groups):
        slots = np.array(share.blocks[index]).repeat(group.block_size) * group.block_size
        slots += np.arange(len(slots)) % group.block_size
        done: set[tuple[int, int, Sees]] = set()
        for name, sees in group.layers.items():
            written, seen = request.slots[name], request.seen.get(name)
            # Layers with the same metadata share the arrays: each is compared once.
            if (case := (id(written), id(seen), sees)) not in done:
                done.add(case)
                expected = slots[share.start : share.start + share.count]
                _check_equal(written, expected, f"{share.request.name}: written in {name}")
                for position, keys in zip(request.positions, seen or (), strict=False):
                    who = f"{share.request.name} at {position} in {name}"
                    visible = np.array(seen_keys(sees, position))
                    _check_equal(keys.positions, visible, f"{who}: sees")
                    _check_equal(keys.slots, slots[visible], f"{who}: sees in slots")


def _check_equal(got: Any, expected: np.ndarray, message: str) -> None:
    if not np.array_equal(got, expected):  # By itself: NumPy's assertion takes ten times as long.
        np.testing.assert_array_equal(got, expected, err_msg=message)
