"""Every step's inputs against a model that keeps no state: the scheduler's own view of each request.

Hypothesis drives a real engine through arrivals, aborts, chunks, preemptions, prefix hits and finishes; at each step
the batch is compared with what the scheduler's requests and block manager say, array by array.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from conftest import engine
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from model_runner_base.graph_policy import GraphSize
from model_runner_base.input_batch import InputBatch, PackedInputs, unpack
from model_runner_base.testing.models import TinyModel

BLOCK_SIZE = 16


class Checker:
    """Compares each step's batch and packed arrays with the scheduler's requests."""

    def __init__(self, llm: LLM) -> None:
        self.core = llm.llm_engine.engine_core.engine_core
        self.runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.steps = self.steady_steps = 0
        self.fed_later: list[tuple[object, int, int]] = []
        build = self.runner.batch_builder.build

        def checked(scheduler_output: SchedulerOutput) -> InputBatch:
            batch = build(scheduler_output)
            self.check(scheduler_output, batch)
            return batch

        self.runner.batch_builder.build = checked
        prepare = self.runner._prepare_inputs

        def checked_inputs(scheduler_output: SchedulerOutput) -> tuple[InputBatch, GraphSize, torch.Tensor]:
            batch, size, packed = prepare(scheduler_output)
            self.check_packed(batch, size, packed)
            return batch, size, packed

        self.runner._prepare_inputs = checked_inputs

    def check_fed_later(self) -> None:
        """What was fed before the scheduler knew it is what it was then told, unless the request ended first."""
        for request, position, fed in self.fed_later:
            known = request.all_token_ids
            assert position >= len(known) or known[position] == fed
        self.fed_later.clear()

    def check_packed(self, batch: InputBatch, size: GraphSize, packed: torch.Tensor) -> None:
        """What went to the device equals a plan and buffer made afresh, whatever was moved on in place."""
        self.steady_steps += batch.follows
        adapter = self.runner.attention
        fresh = PackedInputs(self.runner._sections)
        _, views = fresh.views(size)
        plans = adapter._make_plans(batch)
        self.runner.batch_builder.pack(batch, views, is_repeat=False)
        adapter.pack(batch, plans, size, views, is_repeat=False)
        sections = unpack(packed, self.runner._sections(size))
        for name, view in views.items():
            if name.startswith("pair_blocks") or name == "token_ids":
                continue
            np.testing.assert_array_equal(sections[name], view, err_msg=name)
        on_host = batch.token_sources < 0
        np.testing.assert_array_equal(sections["token_ids"][on_host], views["token_ids"][on_host])
        # Block ids behind the last token of a row are leftovers; all others count.
        for index, (group, plan) in enumerate(zip(adapter.groups, plans, strict=True)):
            blocks = np.arange(group.geometry.blocks_per_tile) * group.geometry.block_size
            reach = plan.pair_offset + plan.tile_len[plan.pair_tile] - 1
            used = blocks <= reach[:, None]
            got = sections[f"pair_blocks.{index}"][: plan.num_pairs].numpy()
            np.testing.assert_array_equal(got[used], plan.pair_blocks[used])

    def check(self, scheduler_output: SchedulerOutput, batch: InputBatch) -> None:
        self.steps += 1
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs)
        assert batch.req_ids == list(scheduler_output.num_scheduled_tokens)
        last_tokens = self.runner.last_tokens[0].tolist()
        table = self.runner.block_tables[0].table
        token = 0
        for index, (req_id, count) in enumerate(scheduler_output.num_scheduled_tokens.items()):
            request = self.core.scheduler.requests[req_id]
            known = list(request.all_token_ids)
            row = batch.rows[index]
            start = computed[req_id]
            assert (batch.query_start[index], batch.query_len[index]) == (token, count)
            assert (batch.num_computed[index], batch.seq_lens[index]) == (start, start + count)
            assert batch.is_sampled[index] != request.is_prefill_chunk
            block_ids = self.core.scheduler.kv_cache_manager.get_block_ids(req_id)[0]
            for position in range(start, start + count):
                assert batch.positions[token] == position
                assert batch.token_rows[token] == row
                assert table[row, position // BLOCK_SIZE] == block_ids[position // BLOCK_SIZE]
                if batch.token_sources[token] >= 0:
                    assert batch.token_sources[token] == row and position == start + count - 1
                    fed = last_tokens[row]
                else:
                    fed = batch.token_ids[token]
                if position < len(known):
                    assert fed == known[position]
                else:  # Sampled by a step in flight: the scheduler learns of it later.
                    self.fed_later.append((request, position, fed))
                token += 1
        assert len(set(batch.rows.tolist())) == len(batch.rows), "two requests share a row"
        assert self.runner.requests.num_reqs <= self.runner.requests.max_num_reqs


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def checked_engine(request: pytest.FixtureRequest, tiny_model: Callable[[str], TinyModel]) -> Iterator[LLM]:
    options = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": 27, "async_scheduling": request.param}
    with engine(
        tiny_model("llama").path,
        max_model_len=400,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        enforce_eager=True,
        **options,
    ) as llm:
        llm.checker = Checker(llm)
        yield llm


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 40), st.integers(0, 3)),
        st.tuples(st.just("add"), st.integers(230, 260), st.integers(1, 60), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 8)),
    ),
    max_size=25,
)


@given(actions)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    # No shrinking: the engine is shared, and after a failure it is not fit for another script.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_every_step_is_what_the_scheduler_says(checked_engine: LLM, script: list[tuple]) -> None:
    core = checked_engine.llm_engine
    added: list[str] = []
    for action, *values in script:
        if action == "add":
            length, count, family = values
            # A family shares its beginning, so that prefix-cache hits occur.
            prompt = np.random.default_rng(family).integers(3, 500, length).tolist()
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            added.append(f"{checked_engine.checker.steps}-{len(added)}")
            core.add_request(added[-1], {"prompt_token_ids": prompt}, params)
        elif action == "abort" and added:
            core.abort_request([added[values[0] % len(added)]])
        elif action == "step":
            for _ in range(values[0]):
                core.step()
    for _ in range(2000):
        if not core.has_unfinished_requests():
            checked_engine.checker.check_fed_later()
            return
        core.step()
    raise AssertionError("the engine did not finish its requests")


def test_nothing_leaks(checked_engine: LLM) -> None:
    """After all of the above: every row and every block is free again once the next request runs."""
    long, short = (
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in (150, 1)
    )
    checked_engine.generate([{"prompt_token_ids": [5]}] * 3, long, use_tqdm=False)
    checked_engine.generate([{"prompt_token_ids": [5]}], short, use_tqdm=False)
    assert checked_engine.checker.runner.requests.num_reqs == 1
    assert checked_engine.checker.core.scheduler.kv_cache_manager.usage == 0
    assert checked_engine.checker.steady_steps > 100, "the fast path of steady decode was hardly taken"


def test_requests_set_aside_without_a_word_come_back(tiny_model: Callable[[str], TinyModel]) -> None:
    """A forced preemption is reported in no set; a newcomer of higher priority must find a row all the same."""
    model = tiny_model("llama")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    options = {"max_num_seqs": 2, "scheduling_policy": "priority", "enforce_eager": True, "max_model_len": 128}
    with engine(model.path, **options) as llm:
        core, tokens = llm.llm_engine, {}
        for name in ("a", "b"):
            core.add_request(name, {"prompt_token_ids": [5, 6, ord(name)]}, params, priority=1)
        for _ in range(4):
            core.step()
        llm.llm_engine.engine_core.reset_prefix_cache(reset_running_requests=True)
        core.add_request("first", {"prompt_token_ids": [7, 8]}, params, priority=0)
        for _ in range(200):
            tokens.update((out.request_id, list(out.outputs[0].token_ids)) for out in core.step() if out.finished)
        assert tokens["first"] == model.greedy((7, 8), 12)
        for name in ("a", "b"):
            assert tokens[name] == model.greedy((5, 6, ord(name)), 12)
