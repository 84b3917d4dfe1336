"""Reading of vLLM's step types and cache specs, against objects of vLLM's own made by hand."""

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from model_runner_base.attention.cache_format import CacheFormat
from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.caches import allocation
from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.request_states import RequestInfo
from model_runner_base.step.schedule import Arrival, Grammar, read_grammar, read_schedule
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.scheduler_outputs import Continued, HandMadeStep
from model_runner_base.vllm_compat.patches.items import keep_item_data
from model_runner_base.vllm_compat.types import kv_cache
from model_runner_base.vllm_compat.types.attention_metadata import StepBounds, StepOnDevice, common_metadata
from model_runner_base.vllm_compat.types.kv_cache import CacheLayout, planning, read_layout

BLOCKS = st.tuples(st.lists(st.integers(1, 99), min_size=1, max_size=3), st.lists(st.integers(1, 99), max_size=3))
TOKENS = st.lists(st.integers(0, 500), min_size=1, max_size=6)


def new_request(req_id: str, data: st.DataObject) -> NewRequestData:
    token_ids = data.draw(st.one_of(st.none(), TOKENS))
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=token_ids,
        prompt_embeds=torch.ones(data.draw(st.integers(1, 5)), 3) if token_ids is None else None,
        mm_features=[],
        sampling_params=SamplingParams(seed=data.draw(st.integers(0, 9))),
        pooling_params=None,
        block_ids=data.draw(BLOCKS),
        num_computed_tokens=data.draw(st.integers(0, 4)),
        lora_request=None,
    )


@given(st.data())
@settings(deadline=None)
def test_schedule_says_what_the_scheduler_said(data: st.DataObject) -> None:
    """Requests that are new, resume, go on, end and are preempted."""
    names = data.draw(st.permutations("abcdefgh"))
    num_new, num_cached, num_finished = (data.draw(st.integers(0, 3)) for _ in range(3))
    new = [new_request(name, data) for name in names[:num_new]]
    continued = list(names[num_new : num_new + num_cached])
    resumed = set(data.draw(st.lists(st.sampled_from(continued), unique=True))) if continued else set()
    finished = set(names[num_new + num_cached :][:num_finished])
    preempted = data.draw(st.sampled_from([None, set(), {"z"}]))
    blocks = [data.draw(BLOCKS if name in resumed else st.one_of(st.none(), BLOCKS)) for name in continued]
    every = {name: data.draw(TOKENS) for name in continued if name in resumed or data.draw(st.booleans())}
    computed = [data.draw(st.integers(0, 9)) for _ in continued]
    cached = CachedRequestData(
        req_ids=continued,
        resumed_req_ids=resumed,
        new_token_ids=[],
        all_token_ids=every,
        new_block_ids=list(blocks),
        num_computed_tokens=computed,
        num_output_tokens=[1] * len(continued),
    )
    scheduled = {
        name: data.draw(st.integers(1, 9)) for name in data.draw(st.permutations([*names[:num_new], *continued]))
    }
    output = SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={"a": [0]} if data.draw(st.booleans()) else {},
        num_common_prefix_blocks=[0, 0],
        finished_req_ids=finished,
        free_encoder_mm_hashes=[],
        preempted_req_ids=preempted,
    )
    schedule = read_schedule(output)

    assert set(schedule.finished) == finished and set(schedule.preempted) == (preempted or set())
    assert list(schedule.continued) == continued
    assert dict(schedule.num_tokens) == scheduled and list(schedule.num_tokens) == list(scheduled)
    assert schedule.total_num_tokens == sum(scheduled.values())
    assert dict(schedule.encoder_inputs) == output.scheduled_encoder_inputs
    assert list(schedule.new_blocks) == [
        None if name in resumed else added for name, added in zip(continued, blocks, strict=True)
    ]
    arrivals = {arrival.req_id: arrival for arrival in schedule.arrivals}
    assert len(arrivals) == len(schedule.arrivals) and arrivals.keys() == resumed | set(names[:num_new])
    for name, added, start in zip(continued, blocks, computed, strict=True):
        if name in resumed:
            arrival = arrivals[name]
            assert (arrival.token_ids, arrival.num_computed) == (every[name], start)
            assert arrival.block_ids == added and arrival.params is None
    for each in new:
        arrival = arrivals[each.req_id]
        assert (arrival.num_computed, arrival.block_ids) == (each.num_computed_tokens, each.block_ids)
        ids = each.prompt_token_ids or [0] * len(each.prompt_embeds)  # type: ignore[arg-type]
        assert arrival.token_ids == ids and arrival.params is each.sampling_params is not None
        assert arrival.prompt_embeds is each.prompt_embeds
    # The scheduler keeps its lists.
    assert cached.new_block_ids == blocks and cached.req_ids == continued
    if not resumed:
        assert schedule.new_blocks is cached.new_block_ids and schedule.continued is continued, "copied for nothing"


def step_of(new: list[NewRequestData], num_tokens: dict[str, int], drafts: dict[str, list[int]]) -> SchedulerOutput:
    """A step in which requests arrive, while "b" goes on."""
    step = HandMadeStep(new, [Continued("b", False, None, None, 9, 3)])
    output = step.scheduler_output(num_tokens, set(), set(), 1)
    output.scheduled_spec_decode_tokens = drafts
    return output


def test_who_resumes_as_a_new_request() -> None:
    """A request that resumes arrives with all its tokens, as vLLM's second runner is told. One that has no tokens of
    its own yet arrives as it did first."""
    params = SamplingParams()
    known: Any = {"mm_features": [], "pooling_params": None, "num_computed_tokens": 0, "lora_request": None}
    new = [
        NewRequestData("a", [5, 6], sampling_params=params, block_ids=([1],), prefill_token_ids=[5, 6, 7, 8], **known),
        NewRequestData("c", [5, 6], sampling_params=params, block_ids=([2],), prefill_token_ids=[5, 6], **known),
    ]
    first, second = read_schedule(step_of(new, {"b": 1, "a": 4, "c": 2}, {})).arrivals
    assert first == Arrival("a", [5, 6, 7, 8], 0, ([1],))
    assert second == Arrival("c", [5, 6], 0, ([2],), params, items=[])
    info = RequestInfo(params, 1, [5, 6])
    assert first.resumes(info) and second.resumes(info)
    assert not Arrival("c", [5, 6, 9], 0, ([2],), params).resumes(info)
    assert not Arrival("c", [5, 6], 0, ([2],), SamplingParams(seed=3)).resumes(info)


def test_places_for_drafts_of_who_arrives_are_left_out() -> None:
    """A request that arrives has no drafts, so its places for them are left out. Requests that go on keep theirs,
    and the scheduler keeps its lists."""
    step = HandMadeStep()
    step.add_new("a", [5], SamplingParams(), [[1]], 0)
    output = step_of(step.new, {"b": 3, "a": 3}, {"b": [7, 8], "a": [-1, -1]})
    schedule = read_schedule(output)
    assert schedule.num_tokens == {"b": 3, "a": 1} and schedule.drafts == {"b": [7, 8]}
    assert schedule.total_num_tokens == 4
    assert output.num_scheduled_tokens == {"b": 3, "a": 3} and len(output.scheduled_spec_decode_tokens) == 2
    plain = step_of([], {"b": 3}, {"b": [7, 8]})
    assert read_schedule(plain).num_tokens is plain.num_scheduled_tokens, "copied for nothing"


def test_hand_made_steps_are_vllms() -> None:
    """The kit's scheduler tells of a step as vLLM's does: every field that a release adds must be thought of."""
    output = HandMadeStep().scheduler_output({"a": 2, "b": 3}, {"c"}, {"d"}, 2)
    assert isinstance(output, SchedulerOutput) and output.total_num_scheduled_tokens == 5
    empty = SchedulerOutput.make_empty()
    assert {name for name in vars(empty)} == {name for name in vars(output)}
    schedule = read_schedule(empty)
    assert not (schedule.finished or schedule.preempted or schedule.arrivals or schedule.continued)
    assert not (schedule.num_tokens or schedule.total_num_tokens or schedule.encoder_inputs)


def test_grammar_is_read_as_it_is() -> None:
    """A request's rows may be as many as any request may have drafts and one; those that it lacks are left out."""
    bitmask = np.arange(6, dtype=np.int32).reshape(2, 3)
    grammar = read_grammar(GrammarOutput(structured_output_request_ids=["b", "a"], grammar_bitmask=bitmask))
    assert grammar is not None and list(grammar.req_ids) == ["b", "a"] and grammar.bitmask is bitmask
    assert grammar.at(np.array([0, 0]), decode_query_len=3).tolist() == bitmask.tolist()
    even, places = Grammar(["b", "a"], np.arange(6)[:, None]), np.array([0, 0, 1, 2])
    assert even.at(places, decode_query_len=3).ravel().tolist() == [0, 3, 4, 5]
    assert even._replace(bitmask=even.bitmask[:4]).at(places, decode_query_len=3).ravel().tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="not known which drafts"):
        even._replace(bitmask=even.bitmask[:5]).at(places, decode_query_len=3)
    assert read_grammar(None) is None


def test_metadata_of_builders_name_the_step() -> None:
    """Two requests: 3 tokens after 5 others, and 1 after 6; on the host the second may be anything up to that."""
    on_device = StepOnDevice(
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([8, 4], dtype=torch.int32),
        block_table=torch.tensor([[7, 9], [4, 0]], dtype=torch.int32),
        slot_mapping=torch.arange(4),
    )
    bounds = StepBounds(torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([8, 7], dtype=torch.int32), True, 3, 8)
    metadata = common_metadata(on_device, bounds)
    assert (metadata.num_reqs, metadata.num_actual_tokens) == (2, 4)
    assert (metadata.max_query_len, metadata.max_seq_len) == (3, 8)
    assert metadata.seq_lens is on_device.seq_lens and metadata.query_start_loc is on_device.query_start_loc
    assert metadata.block_table_tensor is on_device.block_table and metadata.slot_mapping is on_device.slot_mapping
    assert metadata.query_start_loc_cpu.tolist() == [0, 3, 4]
    if hasattr(metadata, "seq_lens_cpu_upper_bound"):
        assert metadata.seq_lens_cpu_upper_bound.tolist() == [8, 7]
    else:
        assert metadata._seq_lens_cpu.tolist() == [8, 7] and metadata._num_computed_tokens_cpu.tolist() == [5, 6]


# ---- The KV cache ----

NUM_BLOCKS = 10


def spec(num_kv_heads: int, head_size: int, window: int | None = None, chunk: int | None = None) -> KVCacheSpec:
    sizes: Any = {"block_size": 16, "num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": torch.float32}
    if window:
        return SlidingWindowSpec(**sizes, sliding_window=window)
    return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=chunk) if chunk else FullAttentionSpec(**sizes)


@pytest.fixture(scope="module")
def config(tiny_model: Callable[[str], TinyModel]) -> VllmConfig:
    config = EngineArgs(str(tiny_model("llama").path), max_model_len=256, block_size=16).create_engine_config()
    for layout in PagedAttentionBackend.supported_kv_cache_layouts() if kv_cache.IS_ONE_BUFFER else ():
        config.cache_config.kv_cache_layout = layout.name
    return config


def layout_of(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> CacheLayout:
    """Cache layout as vLLM groups the layers, with memory for ``NUM_BLOCKS`` blocks and a bit."""
    groups = planning.get_kv_cache_groups(config, dict(specs))
    pages = groups[0].kv_cache_spec.page_size_bytes
    if not isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs):
        pages *= max(len(group.layer_names) for group in groups)
    return read_layout(planning.get_kv_cache_config_from_groups(config, groups, pages * NUM_BLOCKS + pages // 2))


CASES: dict[str, tuple[dict[str, KVCacheSpec], list[dict[str, int]], list[list[str]]]] = {
    # Specs; the block size of each layer, a dictionary a group; the layers that share a tensor.
    "alike": ({"a": spec(4, 64), "b": spec(4, 64)}, [{"a": 16, "b": 16}], [["a"], ["b"]]),
    "other heads": ({"a": spec(4, 64), "b": spec(2, 64)}, [{"a": 16, "b": 16}], [["a"], ["b"]]),
    "other shapes of as many bytes": ({"a": spec(4, 64), "b": spec(2, 128)}, [{"a": 16, "b": 16}], [["a"], ["b"]]),
    "a window": (
        {"a": spec(4, 64), "b": spec(4, 64, window=40), "c": spec(4, 64), "d": spec(4, 64, window=40)},
        [{"a": 16, "c": 16}, {"b": 16, "d": 16}],
        [["a", "b"], ["c", "d"]],
    ),
    "chunks and a smaller page": (
        {"a": spec(4, 64), "b": spec(2, 64, chunk=32)},
        [{"a": 16}, {"b": 32}],
        [["a", "b"]],
    ),
    "a window and other shapes of as many bytes": (
        {"a": spec(4, 64), "b": spec(2, 128, window=40)},
        [{"a": 16}, {"b": 16}],
        [["a", "b"]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layout_has_every_layers_own_heads(case: str, config: VllmConfig) -> None:
    """Heads are each layer's own, also of layers that differ, which vLLM puts into one group if all see alike."""
    specs, block_sizes, shared = CASES[case]
    layout = layout_of(config, specs)
    assert layout.num_blocks == NUM_BLOCKS
    assert [dict.fromkeys(group.layers, group.block_size) for group in layout.groups] == block_sizes
    for group in layout.groups:
        for name, layer in group.layers.items():
            own: Any = specs[name]
            assert (layer.num_kv_heads, layer.head_size, layer.dtype) == (own.num_kv_heads, own.head_size, own.dtype)
            assert layer.spec == own.copy_with_new_block_size(group.block_size)
    assert [tensor.layer_names for tensor in layout.tensors] == shared
    assert [tensor.num_blocks for tensor in layout.tensors] == [NUM_BLOCKS] * len(shared)


@pytest.mark.parametrize("case", CASES)
def test_caches_hold_every_layers_blocks(case: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one tensor share its memory; all others have their own."""
    specs, block_sizes, shared = CASES[case]
    layers: Any = {
        name: SimpleNamespace(
            get_attn_backend=lambda: PagedAttentionBackend,
            get_kv_cache_spec=lambda _, own=own: own,
            kv_cache=None,
            impl=SimpleNamespace(cache_format=CacheFormat(own.num_kv_heads, own.head_size)),
        )
        for name, own in specs.items()
    }
    for module in (allocation, kv_cache):
        monkeypatch.setattr(module, "attention_layers", lambda _: layers)
    layout = layout_of(config, specs)
    caches, index_of = allocation.allocate(layout, config, DeviceOps(torch.device("cpu")), 64)
    allocation.bind_kv_caches(caches, index_of, config)
    memory = {}
    for group in block_sizes:
        for name, block_size in group.items():
            own: Any = specs[name]
            cache = layers[name].kv_cache
            shape = (NUM_BLOCKS, block_size, 2 * own.num_kv_heads, own.head_size)
            assert cache.numel() == np.prod(shape) and cache.dtype == own.dtype and not cache.any()
            # What attention makes of it, where it lies in memory that a layer with other heads shares.
            assert cache.view(shape).data_ptr() == cache.data_ptr()
            memory[name] = cache.data_ptr()
    assert {frozenset(other for other in memory if memory[other] == memory[name]) for name in memory} == {
        frozenset(names) for names in shared
    }


def test_items_in_a_cached_prefix_come_with_their_data() -> None:
    """An image that is cached may have to be encoded again, once its request was preempted."""
    keep_item_data()
    place = PlaceholderRange(offset=2, length=4)
    item = MultiModalFeatureSpec(MultiModalKwargsItem(), "image", "abc", place)  # type: ignore[arg-type]
    request = Request("a", list(range(12)), SamplingParams(), None, mm_features=[item], **first_arguments())
    request.num_computed_tokens = 8
    new = NewRequestData.from_request(request, ([1],))
    assert [(each.identifier, each.data is None) for each in new.mm_features] == [("abc", False)]


def first_arguments() -> dict[str, Any]:
    """Arguments that vLLM 0.16 asks for, and later releases do not."""
    return {"eos_token_id": None} if "eos_token_id" in signature(Request).parameters else {}


def test_a_layer_of_several_tensors_gets_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of recurrent states finds its tensors where vLLM reads them; a layer of one tensor has that one."""
    config: Any = None
    states: Any = Mock(spec=MambaBase, kv_cache=(torch.zeros(0),) * 2)
    attention = SimpleNamespace(kv_cache=torch.zeros(0))
    monkeypatch.setattr(allocation, "attention_layers", lambda _: {"attention": attention})
    monkeypatch.setattr(allocation, "recurrent_layers", lambda _: {"states": states})
    caches = [torch.full((2,), float(index)) for index in range(3)]
    allocation.bind_kv_caches(caches, {"states": (0, 2), "attention": (1,)}, config)
    # As vllm/model_executor/layers/mamba/mamba_mixer2.py takes them.
    own: Any = states.kv_cache[0] if kv_cache.HAS_VIRTUAL_ENGINES else states.kv_cache
    assert own[0] is caches[0] and own[1] is caches[2] and attention.kv_cache is caches[1]
