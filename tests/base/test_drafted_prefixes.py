"""Prefix caching of models with recurrent layers together with drafts: what is kept is the state after right tokens."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import engine
from lane import HAS_OPENXLA
from test_recurrent_models import spoil
from test_recurrent_speculation import multi_token_prediction
from test_state_prefixes import NEW_TOKENS, OPTIONS, SIZE, cached
from vllm import LLM

from model_runner_base.caches.paged import ring_size
from model_runner_base.caches.states import BLOCKS, RingUpdates, fill_rings
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.request_states import BlockTable
from model_runner_base.step.sizes import StepKind, StepSize
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_equality import run_with_arrivals, run_with_resets
from model_runner_base.testing.drafts import KnownDrafts, speculation
from model_runner_base.testing.engine import core_of, metric, runner_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.recurrent_architectures import RECURRENT
from model_runner_base.vllm_compat.types.recurrent import num_states

Tiny = Callable[[str], TinyModel]
ALONE = random_prompts(131, [blocks * SIZE + offset for blocks in (1, 2, 4) for offset in (-1, 0, 1)])
TOGETHER = [start + end for start in random_prompts(132, [16, 30, 50]) for end in random_prompts(133, [1, 2, 20])]
LONG = random_prompts(134, [30, 47, 60])
LONG_OUTPUTS = 40
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
KEEPS_OUTPUTS: dict[str, Any] = {} if HAS_OPENXLA else {"prefix_cache_retention_interval": SIZE}
"""Has vLLM 0.33 keep the states of outputs, too, which steps with drafts have written."""


KNOWN = dict.fromkeys([*ALONE, *TOGETHER], NEW_TOKENS) | dict.fromkeys(LONG, LONG_OUTPUTS + NEW_TOKENS)
DRAFTING = "qwen3_5" if "qwen3_5" in RECURRENT else "qwen3-next"
"""The model with a drafting layer. vLLM schedules drafts asynchronously if it is a layer that makes them."""


@pytest.fixture(scope="module", params=["lfm2 ngram", f"{DRAFTING} mtp"])
def served(
    request: pytest.FixtureRequest, tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, TinyModel]]:
    """An engine whose drafts are often wrong; the first is synchronous."""
    name, method = request.param.split()
    model, drafts = tiny_model(name), speculation("ngram", tiny_model(name))
    if method == "mtp":
        path = tmp_path_factory.mktemp("drafting") / name
        model, drafts = TinyModel(multi_token_prediction(model, path)), {"method": "mtp", "num_speculative_tokens": 3}
    options = OPTIONS | KEEPS_OUTPUTS | {"speculative_config": drafts, "max_num_batched_tokens": 48}
    with engine(model.path, **options) as llm:
        scheduler = core_of(llm).scheduler
        assert scheduler.vllm_config.scheduler_config.async_scheduling == (method == "mtp")
        pool = scheduler.kv_cache_manager.coordinator.single_type_managers[-1].block_pool
        assert pool.num_gpu_blocks == 1 + num_states(llm.llm_engine.vllm_config)
        if method == "ngram":
            known = KnownDrafts(llm, model, KNOWN, is_wrong=False)
            runner_of(llm).parts.drafter.look_up = known.look_up
        yield llm, model
        assert 0 < metric(llm, ACCEPTED) < metric(llm, DRAFTED), "drafts were all right, or all wrong"


def dropped(llm: LLM) -> int:
    """Number of tokens at the end of a hit that are computed anew: on vLLM 0.16 a block, for hidden states to draft
    from."""
    return SIZE * (HAS_OPENXLA and llm.llm_engine.vllm_config.speculative_config.method == "mtp")


def looked_ahead(llm: LLM) -> int:
    """Number of tokens after a block that must be the same, too: vLLM 0.33's way where hidden states draft."""
    return getattr(core_of(llm).scheduler, "num_hash_lookahead_tokens", 0)


def hit_of(llm: LLM, length: int) -> int:
    """Number of tokens of a prompt that are hit if it was computed before."""
    return max((length - 1) // SIZE * SIZE - dropped(llm), 0)


def test_hits(served: tuple[LLM, TinyModel]) -> None:
    """A prompt that comes again gets the same text, from the cache; so do prompts that go on otherwise."""
    llm, model = served
    spoil(llm)
    for prompt in ALONE:
        hit = hit_of(llm, len(prompt))
        assert cached(llm, model, [prompt]) == [0]
        assert cached(llm, model, [prompt]) == [hit]
        if hit:
            common = prompt[: hit + dropped(llm) + looked_ahead(llm)]
            assert cached(llm, model, [common + prompt]) == [hit]
    cached(llm, model, ALONE[-3:])
    assert cached(llm, model, ALONE[-2:]) == [hit_of(llm, len(prompt)) for prompt in ALONE[-2:]]


def test_outputs_continued(served: tuple[LLM, TinyModel]) -> None:
    """Prompts that go on after outputs: states that decode has left, with wrong drafts at the ends of blocks, are hit.

    A user would else get an answer to a conversation in which a wrong draft was said.
    """
    llm, model = served
    for prompt in LONG:
        cached(llm, model, [prompt], LONG_OUTPUTS)
        outputs = model.greedy(prompt, LONG_OUTPUTS)
        for count in (7, 20, 33, 39):
            longer = (*prompt, *outputs[:count], 3)
            # vLLM 0.16 keeps states of prompts alone.
            (hit,) = cached(llm, model, [longer], 3)
            assert hit == hit_of(llm, len(longer) - looked_ahead(llm)) or not KEEPS_OUTPUTS
            assert cached(llm, model, [longer], 3) == [hit_of(llm, len(longer))]


def test_preemption(served: tuple[LLM, TinyModel]) -> None:
    """Requests that lose their states at any step, with drafts in flight, begin again at a state that was kept."""
    llm, model = served
    if llm.llm_engine.vllm_config.scheduler_config.async_scheduling:
        pytest.skip("vLLM itself fails to reset requests with wrong drafts in flight")
    check_equal(model, LONG, run_with_resets(llm, LONG, 90), [90] * len(LONG))


def test_arrivals(served: tuple[LLM, TinyModel]) -> None:
    """Requests that arrive, finish and are aborted at any step, with prefixes in common."""
    llm, model = served
    rng = np.random.default_rng(135)
    counts = rng.integers(1, NEW_TOKENS + 1, len(TOGETHER)).tolist()
    check_equal(model, TOGETHER, run_with_arrivals(llm, TOGETHER, counts, rng), counts)


@pytest.mark.parametrize(("query", "unread"), [(4, 3), (1, 0)], ids=["drafts", "single tokens"])
def test_repeated_steps(query: int, unread: int) -> None:
    """Rings of a repeated step are those of a step that is packed anew, however far requests have come.

    Entries are sent where a request may enter a block.
    """
    rng = np.random.default_rng(136)
    table, width = BlockTable(5, 400, SIZE, 1), ring_size(1 + unread + query, SIZE)
    table.table[:] = rng.permutation(table.table.size).reshape(table.table.shape)
    table.num_blocks[:] = table.table.shape[1]
    rows, positions = np.array([3, 0, 4]), np.array([5, 14, 28])
    batch = InputBatch([], 3 * query, rows, np.full(3, query), *[np.zeros(3)] * 4, 3, 3, query)  # type: ignore[arg-type]
    limits: Any = type("Limits", (), {"unread": unread, "decode": type("Tiling", (), {"query": query})})
    step = PackedStep(StepSize(StepKind.DECODE, (4, 4, 4)), [Section(BLOCKS, (4, width))], None)  # type: ignore[arg-type]
    fill_rings(table, unread, positions, batch, step.views[BLOCKS])
    updates = RingUpdates(table, limits, batch, step)
    updates.begin(positions)
    num_quiet = 0
    for _ in range(60):
        positions = positions + rng.integers(1, query + 1, 3)
        step.entries.clear()
        before = step.buffer.copy()
        assert updates.advance(positions)
        for row, ring, position in zip(rows, step.views[BLOCKS], positions.tolist(), strict=False):
            for touched in range(max(position - unread - 1, 0), position + query):
                assert ring[touched // SIZE % width] == table.table[row, touched // SIZE]
        assert step.entries.count[0] == (before != step.buffer).sum()
        num_quiet += step.entries.count[0] == 0
    assert num_quiet > 20, "something is sent though no request entered a block"


def test_more_drafts_than_a_block_are_refused(tiny_model: Tiny) -> None:
    model = tiny_model("lfm2")
    drafts = speculation("ngram", model) | {"num_speculative_tokens": SIZE}
    words = f"num_speculative_tokens={SIZE} is not less than block_size={SIZE}"
    with pytest.raises(ValueError, match=words), engine(model.path, **OPTIONS, speculative_config=drafts):
        pass
