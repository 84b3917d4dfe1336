"""Paged flash attention in NKI against dense attention in float64: on the stand-in, and on NKI's simulator if there."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import nki_standin
import pytest
import torch
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nki_cases import DECODE, MIXED, PREFILL, WHOLE, Case, Step, key_ranges, make_step, plan_padding
from vllm.v1.attention.backend import AttentionType

from model_runner_base.attention.plan import KeyRange
from neuron_runner.nki.attention import NkiAttentionImpl
from neuron_runner.nki.availability import nki_available

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
OURS = ("neuron_runner.nki.dialect", "neuron_runner.nki.kernel")
SDK = nki_available()


@pytest.fixture(
    scope="module",
    params=[
        "stand-in",
        pytest.param("simulator", marks=pytest.mark.skipif(not SDK, reason="Neuron's SDK (nki) is not installed")),
    ],
)
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runtime that the kernels find when they import ``nki``."""
    with pytest.MonkeyPatch.context() as patch:
        for name in OURS:
            patch.delitem(sys.modules, name, raising=False)
        if request.param == "stand-in":
            for name, module in nki_standin.install().items():
                patch.setitem(sys.modules, name, module)
        yield request.param
        for name in OURS:
            sys.modules.pop(name, None)


def attend(case: Case, step: Step) -> torch.Tensor:
    """Attention through the layer, as the model calls it."""
    impl = NkiAttentionImpl(
        case.heads[0],
        case.head_size,
        case.head_size**-0.5,
        case.heads[1],
        sliding_window=case.key_range.window or None,
        logits_soft_cap=case.soft_cap or None,
        attn_type=AttentionType.ENCODER_ONLY if case.key_range.is_whole else AttentionType.DECODER,
    )
    query, key, value = (x.reshape(len(x), -1) for x in (step.query, step.key, step.value))
    out = impl.forward(None, query, key, value, step.cache, step.metadata)  # type: ignore[arg-type]
    return out.view(step.query.shape)


def check(case: Case, step: Step | None = None) -> float:
    step = step or make_step(case)
    out = attend(case, step)
    assert out.dtype == case.dtype
    assert torch.isfinite(out).all(), "padding must stay finite: it is written to the null block"
    error = float((out[step.places].double() - torch.from_numpy(step.wanted)).abs().max())
    assert error <= TOLERANCE[case.dtype]
    return error


GRID = [
    *(Case(requests, dtype=dtype) for requests in (DECODE, PREFILL, MIXED) for dtype in TOLERANCE),
    # Heads: MHA, GQA, MQA, one pass and several, more than 128 rows.
    *(
        Case(requests, heads=heads, head_size=32)
        for requests in (DECODE, MIXED)
        for heads in ((1, 1), (8, 8), (8, 2), (6, 1), (12, 3), (40, 40), (32, 4), (28, 4))
    ),
    *(
        Case(r, head_size=d, dtype=t)
        for r in (DECODE, MIXED)
        for d in (8, 24, 64, 80, 96, 128)
        for t in (torch.bfloat16,)
    ),
    *(Case(r, block_size=b) for r in (DECODE, MIXED) for b in (1, 2, 3, 4, 8, 32, 48, 64, 128, 256)),
    # KV tiles from the openxla attention's own to several PSUM banks.
    *(Case(r, reach=s) for r in (DECODE, MIXED) for s in (16, 64, 256, 512, 1024)),
    *(Case(MIXED, heads=(8, 2), query_tile=q, reach=256, dtype=torch.bfloat16) for q in (4, 32, 64, 128)),
    *(Case(r, key_range=KeyRange(w), reach=64, block_size=8) for r in (DECODE, MIXED) for w in (1, 5, 40, 1000)),
    # Chunked local attention: less than a KV tile, and several.
    *(
        Case(r, key_range=KeyRange(chunk=c), reach=64, block_size=8)
        for r in (DECODE, MIXED)
        for c in (1, 24, 100, 1000)
    ),
    # Encoder-only attention sees what comes after a token too.
    *(Case(WHOLE, key_range=KeyRange(w, is_whole=True), reach=64, block_size=8) for w in (0, 1, 40, 1000)),
    *(Case(r, soft_cap=5.0) for r in (DECODE, MIXED)),
    # Decode rows and chunks with KV tiles of their own.
    *(Case(MIXED, reach=s, chunk_reach=c, key_range=KeyRange(w)) for s, c in ((64, 128), (128, 48)) for w in (0, 40)),
    # As a model of today has it: 8B with GQA, one rank; bfloat16.
    Case(MIXED, (32, 8), 128, 32, 512, 128, dtype=torch.bfloat16),
    Case(DECODE, (32, 8), 128, 32, 512, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_kernel_equals_dense(case: Case, runtime: str) -> None:
    check(case)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.integers(1, 40) | st.sampled_from([64, 128, 256]))
    kv_heads = draw(st.integers(1, 4))
    is_decode, key_range = draw(st.booleans()), draw(key_ranges(150))
    request = st.tuples(st.integers(0, 0 if key_range.is_whole else 260), st.integers(1, 1 if is_decode else 50))
    # A multiple of blocks that is also one of 128 partitions, unless it is less than those.
    reach = st.sampled_from([block_size, 100, 128] if 128 % block_size else [block_size, 64, 128, 256])
    return Case(
        requests=tuple(draw(st.lists(request, min_size=1, max_size=4))),
        heads=(kv_heads * draw(st.integers(1, 5)), kv_heads),
        head_size=8 * draw(st.integers(1, 6)),
        block_size=block_size,
        reach=draw(reach),
        query_tile=draw(st.integers(2, 40)),
        key_range=key_range,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        padding=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 100)),
        chunk_reach=draw(st.none() | reach),
    )


@given(cases())
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_kernel_equals_dense_in_drawn_steps(runtime: str, case: Case) -> None:
    check(case)


def test_pairs_of_decode_may_lie_in_any_order(runtime: str) -> None:
    """Pairs may lie in any order, since a step that is repeated appends new pairs after those of other requests."""
    case = Case(DECODE, reach=32, dtype=torch.float32)
    step = make_step(case)
    plan = step.metadata.decode
    assert plan is not None and plan.pair_blocks is not None
    order = torch.randperm(len(plan.pair_tile) - 1, generator=torch.Generator().manual_seed(1))
    order = torch.cat((order, torch.tensor([len(order)])))
    place = torch.argsort(order).int()
    plan = replace(
        plan,
        pair_tile=plan.pair_tile[order],
        last=plan.last[order],
        pair_blocks=plan.pair_blocks[order],
        merge_tree=[place[plan.merge_tree[0]], *plan.merge_tree[1:]],
    )
    step.metadata = replace(step.metadata, decode=plan)
    check(case, step)


KINDS = {"decode": Case(DECODE), "mixed": Case(MIXED), "whole": Case(WHOLE, key_range=KeyRange(is_whole=True))}
for name, key_range in (("window", KeyRange(40)), ("chunked", KeyRange(chunk=24))):
    KINDS |= {f"{name} {kind}": replace(KINDS[kind], key_range=key_range) for kind in ("decode", "mixed")}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_padding_reads_the_null_block_alone(runtime: str, kind: str) -> None:
    """A step of nothing but padding, as in the runner's warm-up, reads the null block alone."""
    case = KINDS[kind]
    step = make_step(case)
    step.metadata = plan_padding(case)
    num_tokens = len(step.metadata.slot_blocks)
    step.query, step.key, step.value = (x[:1].expand(num_tokens, -1, -1) for x in (step.query, step.key, step.value))
    step.cache[1:] = float("nan")
    assert not step.metadata.slot_blocks.any()
    assert torch.isfinite(attend(case, step)).all()


@pytest.mark.parametrize("kind", ["decode", "mixed", "whole"])
def test_dynamo_captures_the_layer_as_one_graph(runtime: str, kind: str) -> None:
    """A layer is one graph with symbolic sizes, as the runner captures a step; the capture serves another step."""
    case = KINDS[kind]
    impl = NkiAttentionImpl(4, 16, 0.25, 2, sliding_window=case.window)
    graph = torch.compile(impl.attend, backend="eager", fullgraph=True, dynamic=True)
    for seed in (0, 1):
        step = make_step(replace(case, seed=seed, padding=3 + seed))
        query, cache = step.query.reshape(len(step.query), -1), torch.nan_to_num(step.cache)
        torch.testing.assert_close(graph(query, cache, step.metadata), impl.attend(query, cache, step.metadata))
