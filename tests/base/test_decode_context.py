"""Ranks that keep a part of each request's positions (decode context parallelism): the tokens are those of one."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import Case, cases, dense_attention, pack
from counts import examples
from greedy import expected
from hypothesis import given, settings
from hypothesis import strategies as st
from lane import HAS_OPENXLA
from scripts import results_of

from model_runner_base.attention import decode_context
from model_runner_base.attention.decode_context import ContextBackend, ContextImpl, ContextPart
from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.attention.plan import CAUSAL, KeyRange
from model_runner_base.caches.decode_context import ContextCaches
from model_runner_base.caches.group import AttentionGroup, ModelCaches
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.step.request_states import BlockTable
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.models import TinyModel

SCRIPT = Path(__file__).with_name("context_engine.py")
PROMPTS = random_prompts(59, [5, 40, 300, 17, 133, 9, 121, 1])
"""Prompts of one chunk and of several; the longest does not fit the blocks that a rank would have alone."""
COUNT = 24


def test_tokens_of_parts_are_those_of_the_whole(tiny_model: Callable[[str], TinyModel]) -> None:
    """Tokens with chunks beside decode rows, preemptions, cached prefixes, and after these were dropped.

    The cache has blocks for 192 tokens and serves 384. Without the other rank's results the tokens are wrong.
    """
    model = tiny_model("gemma")
    interleave = "8" if HAS_OPENXLA else "1"
    args = model.path, json.dumps(PROMPTS), COUNT, interleave
    results = results_of(SCRIPT, *args, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, timeout=1800)["RESULT"]
    want = expected(model, PROMPTS, COUNT)
    for run in ("first", "cached", "reset"):
        assert results[run] == want, run
    assert results["preempted"]
    assert len(PROMPTS[2]) > (results["num_blocks"] - 1) * 16
    wrong = [mine != theirs for mine, theirs in zip(results["of one rank"], want, strict=True)]
    assert sum(wrong) >= len(PROMPTS) - 2


class Meeting:
    """Exchange between ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier = Barrier(size)
        self._given: dict[int, torch.Tensor] = {}

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self._given[rank] = x
        self._barrier.wait(60)
        every = torch.cat([self._given[rank] for rank in sorted(self._given)])
        self._barrier.wait(60)
        return every

    def end(self) -> None:
        self._barrier.abort()


class RankImpl(ContextImpl):
    """Attention of one of several ranks that are threads, with one KV head."""

    def __init__(self, part: ContextPart, meeting: Meeting, num_heads: int, cap: float | None) -> None:
        self.dcp_world_size, self.dcp_rank, self._meeting = part.size, part.rank, meeting
        super().__init__(num_heads, 8, 8**-0.5, 1, logits_soft_cap=cap)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._meeting.gather(self._rank, x)


@given(
    cases().filter(lambda case: case.table.block_size > 1),
    st.sampled_from([(2, 1), (2, 2), (4, 1), (2, 8), (4, 4)]),
    st.sampled_from([None, 5.0]),
    st.integers(0, 40),
    st.sampled_from([0, 1, 5]),
)
@settings(max_examples=examples(24), deadline=None)
def test_attention_of_parts_equals_dense(
    case: Case, ranks: tuple[int, int], cap: float | None, padding: int, piece: int
) -> None:
    """Results of all ranks equal dense attention, with padding, at once and in pieces; a rank writes its own keys."""
    case = case._replace(spans={}, key_range=CAUSAL)
    (size, interleave), (batch, table) = ranks, case[:3:2]
    held = table.block_size // size
    interleave = min(interleave, held)
    step, metadata, _, tokens = pack(case, padding)
    for plan in filter(None, (metadata.decode, metadata.chunks)):
        plan.piece = piece
    rng = np.random.default_rng(0)
    rows = zip(batch.rows, batch.seq_lens, strict=True)
    history = {row: rng.normal(size=(length, 2, 8)).astype(np.float32) for row, length in rows}
    new = torch.zeros(step.num_tokens, 2, 8)
    for token, (row, position) in tokens.items():
        new[token] = torch.from_numpy(history[row][position])
    query = rng.normal(size=(step.num_tokens, size, 2, 8)).astype(np.float32)  # Two heads on each rank.
    meeting = Meeting(size)

    def place(row: int, position: int) -> tuple[int, int]:
        """Block of the cache and offset in it, found by counting the rank's positions of that block."""
        block, offset = divmod(position, table.block_size)
        owner = offset // interleave % size
        return table.table[row, block], sum(each // interleave % size == owner for each in range(offset))

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.full((int(table.table.max()) + 1, held, 2, 8), float("nan"))
        for row, computed in zip(batch.rows, batch.num_computed, strict=True):
            for position in range(computed):
                if position // interleave % size == rank:
                    cache[place(row, position)] = torch.from_numpy(history[row][position])
        part = ContextPart(size, rank, interleave)
        impl = RankImpl(part, meeting, 2, cap)
        own, key, value = torch.from_numpy(query[:, rank].copy()).flatten(1), *new.unbind(1)
        try:
            return impl.forward(None, own, key, value, cache, part.metadata_of(metadata)), cache  # type: ignore[arg-type]
        except BaseException:
            meeting.end()
            raise

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    for rank, (out, cache) in enumerate(found):
        assert torch.isfinite(out).all()
        for token, (row, position) in tokens.items():
            keys, values = history[row][:, :1], history[row][:, 1:]
            want = dense_attention(query[token, rank], keys, values, position, CAUSAL, cap)
            np.testing.assert_allclose(out[token].view(2, 8), want, atol=2e-5)
            if position // interleave % size == rank:
                np.testing.assert_array_equal(cache[place(row, position)], history[row][position])


@pytest.mark.parametrize(
    ("interleave", "backend", "key_range", "message"),
    [
        (1, ContextBackend, CAUSAL, None),
        (16, ContextBackend, CAUSAL, None),
        (32, ContextBackend, CAUSAL, "stored in parts of 16 tokens: use a cp_kv_cache_interleave_size that divides it"),
        (1, ContextBackend, KeyRange(window=9), "layers such as first are not cut over positions yet"),
        (1, PagedAttentionBackend, CAUSAL, "layers such as first are not cut over positions yet"),
    ],
)
def test_layers_that_are_not_cut_are_refused(
    interleave: int, backend: Any, key_range: KeyRange, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_context, "get_dcp_group", lambda: SimpleNamespace(world_size=2, rank_in_group=1))
    parallel = SimpleNamespace(decode_context_parallel_size=2, cp_kv_cache_interleave_size=interleave)
    group = AttentionGroup(["first", "second"], BlockTable(1, 64, 32, 1), 128, 256, key_range, backend)
    model: Any = ModelCaches([group], None, None, SimpleNamespace(parallel_config=parallel), None)  # type: ignore[arg-type]
    if message is None:
        assert isinstance(ContextCaches.make(model), ContextCaches)
    else:
        with pytest.raises(UnsupportedConfigError, match=message):
            ContextCaches.make(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 1, "sliding_window": 8}, "a sliding window is not cut over positions yet"),
        ({"num_kv_heads": 1, "alibi_slopes": [0.5, 0.25]}, "attention with ALiBi is not cut"),
        ({"num_kv_heads": 1, "sinks": torch.zeros(2)}, "attention with sinks is not cut"),
        ({"num_kv_heads": 2}, "2 KV heads on a rank are not cut"),
    ],
)
def test_attention_that_is_not_cut_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=f"{message}.*: use decode_context_parallel_size=1"):
        ContextImpl(2, 8, 1.0, **options)
