"""Sizes that are CUDA graphs, against vLLM's own dispatcher."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as StockRunner

from gpu_runner.graph_policy import CudaGraphPolicy
from model_runner_base.caches.builders import decode_dims
from model_runner_base.step.sizes import COMMON_DIMS, StepKind, StepLimits, Tiling


class Layer(AttentionLayerBase):
    def __init__(self, support: AttentionCGSupport) -> None:
        builder = SimpleNamespace(get_cudagraph_support=lambda vllm_config, spec: support)

        class Backend:
            get_builder_cls = staticmethod(lambda: builder)
            get_name = staticmethod(lambda: support.name)

        self.backend: Any = Backend

    def get_attn_backend(self) -> Any:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return "spec"


def make_config(mode: CUDAGraphMode, sizes: list[int], max_num_seqs: int, layer: Layer) -> Any:
    compilation = SimpleNamespace(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
        compile_sizes=None,
        compile_ranges_split_points=None,
        compile_ranges_endpoints=None,
        adjust_cudagraph_sizes_for_spec_decode=lambda *_: None,
        cudagraph_specialize_lora=False,
        use_inductor_graph_partition=False,
        static_forward_context={"layer": layer},
        is_attention_compiled_piecewise=lambda: True,
        splitting_ops_contain_attention=lambda: True,
    )
    resolve = getattr(CompilationConfig, "resolve_cudagraph_mode_and_sizes", None)
    if resolve is not None:
        compilation.resolve_cudagraph_mode_and_sizes = partial(resolve, compilation)
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=None,
        num_speculative_tokens=0,
        lora_config=None,
    )


def make_dispatcher(config: Any, layer: Layer, query: int) -> CudagraphDispatcher:
    """vLLM's dispatcher, after its own runner has resolved the mode; a request of pure decode has ``query`` tokens."""
    config.num_speculative_tokens = query - 1
    dispatcher = CudagraphDispatcher(config)
    runner: Any = SimpleNamespace(
        vllm_config=config,
        compilation_config=config.compilation_config,
        uniform_decode_query_len=query,
        max_num_reqs=config.scheduler_config.max_num_seqs,
        parallel_config=config.parallel_config,
        cudagraph_dispatcher=dispatcher,
        kv_cache_config=None,
        speculative_config=None,
    )
    StockRunner._check_and_update_cudagraph_mode(runner, [{layer.backend}], [SimpleNamespace(kv_cache_spec="spec")])
    return dispatcher


@settings(deadline=None, max_examples=examples(300))
@given(
    mode=st.sampled_from(list(CUDAGraphMode)),
    support=st.sampled_from(list(AttentionCGSupport)),
    sizes=st.sets(st.integers(1, 40), min_size=1, max_size=6).map(sorted),
    max_num_seqs=st.integers(1, 24),
    steps=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 24)), min_size=1, max_size=8),
    query=st.sampled_from([1, 3]),
)
def test_sizes_are_vllms(
    mode: CUDAGraphMode,
    support: AttentionCGSupport,
    sizes: list[int],
    max_num_seqs: int,
    steps: list[tuple[int, int]],
    query: int,
) -> None:
    """Sizes are vLLM's with drafts too, which it rounds them for. Graphs of any step are the exception, since
    drafting has no use for them."""
    layer = Layer(support)
    sizes = [query * size for size in sizes]
    ours, theirs = (make_config(mode, sizes, max_num_seqs, layer) for _ in range(2))
    decode = Tiling(query, 64)
    limits = StepLimits(150, max_num_seqs, 100, decode, Tiling(16, 64), dims=(*COMMON_DIMS, *decode_dims(decode)))
    if query > 1:
        ours.speculative_config = "drafts"
        if mode == CUDAGraphMode.FULL and support == AttentionCGSupport.ALWAYS:
            theirs.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    policy = CudaGraphPolicy(ours)
    try:
        dispatcher = make_dispatcher(theirs, layer, query)
    except ValueError:
        with pytest.raises(ValueError, match="PIECEWISE"):
            policy.configure(limits)
        return
    policy.configure(limits)
    assert ours.compilation_config.cudagraph_mode == theirs.compilation_config.cudagraph_mode
    for num_tokens, num_reqs in steps:
        num_reqs = min(num_tokens, num_reqs, max_num_seqs)
        is_decode = num_tokens == num_reqs
        rows = num_reqs if is_decode else num_reqs // 2
        num_chunk_tokens, num_tokens = num_tokens - rows, num_tokens + rows * (query - 1)
        expected, padded = dispatcher.dispatch(num_tokens, uniform_decode=is_decode)
        kind = StepKind.DECODE if is_decode else StepKind.MIXED
        dims = {"requests": num_reqs, "logits": rows * query + num_reqs - rows, "decode_rows": rows}
        need = limits.size(kind, tokens=num_tokens, chunk_tokens=num_chunk_tokens, **dims)
        size = policy.dispatch(need)
        assert (policy.mode_of(size), size.num_tokens) == (expected, padded.num_tokens)
        assert size.holds(need._replace(kind=size.kind)) and size.num_reqs <= max_num_seqs
        num_rows = limits.named(size)["decode_rows"]
        assert size.num_logits == size.num_reqs + num_rows * (query - 1)
        assert query == 1 or size.num_tokens == num_rows * query + limits.named(size)["chunk_tokens"]
        if expected == CUDAGraphMode.FULL:
            assert size in policy.sizes, "captured ahead"
        elif expected == CUDAGraphMode.PIECEWISE:
            captured = {each.num_tokens for each in policy.sizes if policy.mode_of(each) == expected}
            assert size.num_tokens in captured, "captured ahead"
        elif expected == CUDAGraphMode.NONE:
            assert size == need
