"""Graph policy of CUDA: derives from vLLM's ``compilation_config`` the step sizes that run as CUDA graphs.

``cudagraph_mode`` names a mode for steps of pure decode and one for mixed steps. FULL: the whole step, logits included,
is one graph (``cuda_graphs.py``). PIECEWISE: vLLM's compilation cuts the model at its attention layers and keeps a
graph for each piece. NONE: the step runs kernel by kernel. So does a step that is larger than all of
``cudagraph_capture_sizes``.
"""

from bisect import bisect_left
from collections.abc import Iterable, MutableSequence

import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport

from gpu_runner.cuda_graphs import StepGraphs
from gpu_runner.vllm_compat import compile_range_ends
from model_runner_base.step.graph_policy import GraphPolicy, StepFunction
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize
from model_runner_base.vllm_compat.types.kv_cache import attention_layers
from model_runner_base.vllm_compat.types.recurrent import kernel_spec, recurrent_layers
from model_runner_base.vllm_compat.types.speculation import max_step_tokens

logger = init_logger(f"vllm.{__name__}")


class CudaGraphPolicy(GraphPolicy):
    """Pads a step's tokens to the next capture size; and its requests too where the whole step is one graph."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._graphs: list[StepGraphs] = []
        points = compile_range_ends(vllm_config)
        if points and vllm_config.speculative_config is not None:
            # A step with drafts may have more tokens than vLLM compiles for: decode rows count with all their drafts.
            points[-1] = max_step_tokens(vllm_config)

    def configure(self, limits: StepLimits) -> None:
        super().configure(limits)
        config = self._vllm_config.compilation_config
        mode = config.cudagraph_mode = resolve_mode(self._vllm_config)
        self._limits = limits
        self._decode, self._mixed = mode.decode_mode(), mode.mixed_mode()
        self._token_sizes = list(config.cudagraph_capture_sizes or ()) if mode != CUDAGraphMode.NONE else []
        most, query = limits.max_num_reqs, limits.decode.query
        whole = self._decode == CUDAGraphMode.FULL and limits.decodes
        self._decode_num_reqs = sorted(
            {size // query for size in self._token_sizes if whole and query <= size <= most * query}
        )
        """Numbers of requests for which pure decode has a graph; each request has the tokens of one decode row."""
        steps = [self._mixed_size(num_tokens, min(num_tokens, most)) for num_tokens in self._token_sizes]
        steps += map(self._decode_size, self._decode_num_reqs)
        self.sizes = sorted({size for size in map(self.dispatch, steps) if self.mode_of(size) != CUDAGraphMode.NONE})

    def _decode_size(self, num_reqs: int) -> StepSize:
        tokens = num_reqs * self._limits.decode.query
        return self._limits.size(StepKind.DECODE, tokens=tokens, requests=num_reqs, logits=tokens, decode_rows=num_reqs)

    def _mixed_size(self, num_tokens: int, num_reqs: int) -> StepSize:
        """A mixed step; where a size tells chunk tokens from those of decode rows, all of its tokens are chunks'."""
        dims = {"tokens": num_tokens, "requests": num_reqs, "logits": num_reqs, "chunk_tokens": num_tokens}
        return self._limits.size(StepKind.MIXED, **dims)

    def warm_up_sizes(self) -> set[StepSize]:
        """Sizes to run before serving: every graph, and steps without a graph that have all kernels compiled, by vLLM
        or at their first launch."""
        config, limits = self._vllm_config.compilation_config, self._limits
        tokens = {limits.max_num_tokens, *(size for size in config.compile_sizes or () if isinstance(size, int))}
        if config.mode == CompilationMode.VLLM_COMPILE:
            tokens.update(compile_range.end for compile_range in config.get_compile_ranges())
        sizes = {self._mixed_size(size, min(size, limits.max_num_reqs)) for size in tokens}
        if limits.decodes:
            sizes.add(self._decode_size(limits.max_num_reqs))
        return {*self.sizes, *map(self.dispatch, sizes)}

    def dispatch(self, need: StepSize) -> StepSize:
        if need.kind == StepKind.DECODE:
            index = bisect_left(self._decode_num_reqs, need.num_reqs)
            if index < len(self._decode_num_reqs):
                return self._decode_size(self._decode_num_reqs[index])
        index = bisect_left(self._token_sizes, need.num_tokens)
        if index == len(self._token_sizes) or self._mixed == CUDAGraphMode.NONE:
            return need
        num_tokens = self._token_sizes[index]
        if self._mixed == CUDAGraphMode.FULL:
            return self._mixed_size(num_tokens, min(num_tokens, self._limits.max_num_reqs))
        num_padding = num_tokens - need.num_tokens
        dims = self._limits.named(need)
        more = {"tokens": num_tokens, "chunk_tokens": dims["chunk_tokens"] + num_padding}
        return self._limits.size(StepKind.MIXED, **(dims | more))

    def mode_of(self, size: StepSize) -> CUDAGraphMode:
        """How a step of a dispatched size runs: FULL, PIECEWISE or NONE."""
        if size.kind == StepKind.DECODE:
            return CUDAGraphMode.FULL if size.num_reqs in self._decode_num_reqs else CUDAGraphMode.NONE
        return self._mixed if size.num_tokens in self._token_sizes else CUDAGraphMode.NONE

    def num_compilations(self) -> int:
        from vllm.compilation.counter import compilation_counter

        full = sum(len(graphs) for graphs in self._graphs)
        return full + compilation_counter.num_cudagraph_captured + compilation_counter.num_backend_compilations

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        """Makes graphs of functions whose first argument is a ``StepSize``. Others, which sample and draft, run kernel
        by kernel."""
        graphs = StepGraphs(function, self.mode_of)
        self._graphs.append(graphs)
        return graphs


def mark_views() -> None:
    """Marks Triton's attention backend for the base (``BuilderCaches``): its metadata are views of the step's tensors,
    so a whole step's graph is replayed without its metadata builder."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    TritonAttentionBackend.metadata_are_views = True  # type: ignore[attr-defined]


def resolve_mode(vllm_config: VllmConfig) -> CUDAGraphMode:
    """The configured ``cudagraph_mode``, lowered to what every attention backend supports, as by vLLM's own runner.

    Raises ValueError where full graphs of mixed steps were asked for and a backend supports no full graphs at all.
    """
    config = vllm_config.compilation_config
    mode = config.cudagraph_mode
    assert mode is not None
    name, support = _least_support(vllm_config)
    has_drafts = vllm_config.speculative_config is not None
    least = AttentionCGSupport.UNIFORM_BATCH if has_drafts else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    # With drafts, a graph of mixed steps would have to know how many of its tokens belong to decode rows.
    if mode.mixed_mode() == CUDAGraphMode.FULL and (support != AttentionCGSupport.ALWAYS or has_drafts):
        if support == AttentionCGSupport.NEVER:
            raise ValueError(
                f"cudagraph_mode={mode.name} is not supported with {name}: use PIECEWISE with compilation mode "
                "VLLM_COMPILE, or NONE"
            )
        is_cut = config.splitting_ops_contain_attention()
        lesser = CUDAGraphMode.FULL_AND_PIECEWISE if is_cut else CUDAGraphMode.FULL_DECODE_ONLY
        mode = _instead(mode, lesser, name if support != AttentionCGSupport.ALWAYS else "speculative decoding")
    if mode.decode_mode() == CUDAGraphMode.FULL and support.value < least.value:
        is_cut = config.mode == CompilationMode.VLLM_COMPILE and (
            config.splitting_ops_contain_attention() or config.use_inductor_graph_partition
        )
        return _instead(mode, CUDAGraphMode.PIECEWISE if is_cut else CUDAGraphMode.NONE, name)
    return mode


def _least_support(vllm_config: VllmConfig) -> tuple[str, AttentionCGSupport]:
    """Name of the attention backend with the least support of full graphs, and that support; recurrent layers have
    backends, too."""
    attention, recurrent = attention_layers(vllm_config).values(), recurrent_layers(vllm_config).values()
    specs = [(layer, layer.get_kv_cache_spec(vllm_config)) for layer in attention]
    specs += [(layer, kernel_spec(layer, vllm_config.model_config.max_model_len)) for layer in recurrent]
    found: Iterable[tuple[str, AttentionCGSupport]] = (
        (backend.get_name(), backend.get_builder_cls().get_cudagraph_support(vllm_config, spec))
        for layer, spec in specs
        if spec is not None
        for backend in [layer.get_attn_backend()]
    )
    return min(found, key=lambda each: each[1].value, default=("none", AttentionCGSupport.ALWAYS))


def _instead(asked: CUDAGraphMode, mode: CUDAGraphMode, backend: str) -> CUDAGraphMode:
    logger.warning("cudagraph_mode=%s is not supported with %s: using %s", asked.name, backend, mode.name)
    return mode
