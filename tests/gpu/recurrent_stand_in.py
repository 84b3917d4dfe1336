"""vLLM's kernels of recurrent layers on a CPU.

Those of Triton run in its interpreter, with what it lacks. The recurrences of chunks are plain torch: Mamba's kernel is
CUDA, that of gated delta nets takes no float32, and Mamba 2's takes too long. They go by what vLLM's metadata builders
say: where requests start, which states are theirs, and which requests have none.
"""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

import gpu_runner.model_runner
from model_runner_base.models.layers.fused_moe import use_plain_experts

LAYERS = "vllm.model_executor.layers.mamba"


def replace_kernels() -> None:
    """Replaces kernels, in a process with Triton's interpreter."""
    if not HAS_TRITON:
        return
    from triton import language
    from triton.runtime import autotuner, interpreter
    from vllm.model_executor.layers.mamba import mamba_mixer, mamba_mixer2

    def init(self: Any, fn: Any, arg_names: Any, grid: Any, *rest: Any) -> None:
        before(self, fn, arg_names, converting(grid, interpreter._implicit_cvt), *rest)

    before = interpreter.GridExecutor.__init__
    interpreter.GridExecutor.__init__ = init
    autotuner.Autotuner._bench = lambda *args, **options: [0.0]  # The first configuration will do.
    torch.cuda.device = lambda index: nullcontext()  # type: ignore[assignment, misc]
    mixer: Any = mamba_mixer
    mixer.selective_scan_fn = scan
    mixer.causal_conv1d_fn = planned(mixer.causal_conv1d_fn)
    mamba_mixer2.mamba_chunk_scan_combined_varlen = scan_heads
    if find_spec(f"{LAYERS}.gdn"):
        import_module(f"{LAYERS}.gdn.qwen_gdn_linear_attn").fla_chunk_gated_delta_rule = delta_rule
        rows: Any = import_module("vllm.third_party.flash_linear_attention.ops.fused_recurrent")
    else:
        import_module("vllm.model_executor.models.qwen3_next").chunk_gated_delta_rule = delta_rule
        rows = import_module("vllm.model_executor.layers.fla.ops.fused_recurrent")
    gpu_runner.model_runner.load_checkpoint = with_plain_experts(gpu_runner.model_runner.load_checkpoint)
    # The interpreter replaces functions in Triton's module alone, and this one was imported from there.
    rows.exp = lambda x: language.exp(x)


def with_plain_experts(load: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Loader of models whose experts are plain torch, since vLLM's need more than Triton."""

    def loaded(*args: Any, **options: Any) -> nn.Module:
        model = load(*args, **options)
        use_plain_experts(model)
        return model

    return loaded


def converting(grid: Any, convert: Callable[[Any], Any]) -> Any:
    """Grid that converts tensors which it has put in place of a kernel's arguments, as that of convolutions does."""
    if not callable(grid):
        return grid

    def converted(arguments: dict[str, Any]) -> Any:
        result = grid(arguments)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                arguments[name] = convert(value)
        return result

    return converted


def planned(convolve: Any) -> Any:
    """Convolution whose programs are counted before its launch, as in other layers; its grid counts them else."""

    def convolved(*args: Any, query_start_loc: torch.Tensor, metadata: Any = None, **options: Any) -> Any:
        if metadata is None:
            plan = compute_causal_conv1d_metadata(query_start_loc, device=query_start_loc.device)
            metadata = SimpleNamespace(**dict(zip(("nums_dict", "batch_ptr", "token_chunk_offset_ptr"), plan)))  # noqa: B905
        return convolve(*args, query_start_loc=query_start_loc, metadata=metadata, **options)

    return convolved


def scan(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    delta_bias: torch.Tensor,
    delta_softplus: bool,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """[dim, T] outputs of Mamba's chunks; states are [S, dim, N], B and C [groups, N, T]."""
    assert delta_softplus
    dt, out = F.softplus(delta + delta_bias.unsqueeze(1)), torch.empty_like(u)
    b, c = (each.view(-1, each.shape[-1]) for each in (B, C))
    requests = zip(pairwise(query_start_loc.tolist()), cache_indices.tolist(), has_initial_state.tolist(), strict=True)
    for (start, stop), index, has_state in requests:
        state = ssm_states[index] if has_state else torch.zeros_like(ssm_states[index])
        for at in range(start, stop):
            state = torch.exp(dt[:, at, None] * A) * state + (dt[:, at] * u[:, at])[:, None] * b[:, at]
            out[:, at] = state @ c[:, at] + D * u[:, at]
        ssm_states[index] = state
    return out * F.silu(z)


def scan_heads(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    seq_idx: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    last_chunk_indices: torch.Tensor,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    final_states_out: torch.Tensor | None = None,
    final_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """[R, H, P, N] states of requests after Mamba 2's chunks, written to ``final_states_out`` if given; x is [T, H, P],
    B and C [T, groups, N]."""
    assert cu_chunk_seqlens[last_chunk_indices + 1].equal(cu_seqlens[1:])
    assert seq_idx[last_chunk_indices].tolist() == list(range(len(cu_seqlens) - 1))
    dt = F.softplus(dt + dt_bias)
    b, c = (each.repeat_interleave(x.shape[1] // each.shape[1], dim=1) for each in (B, C))
    states = []
    for request, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        state = x.new_zeros(*x.shape[1:], B.shape[-1]) if initial_states is None else initial_states[request]
        for at in range(start, stop):
            added = (dt[at, :, None] * x[at])[..., None] * b[at, :, None]
            state = torch.exp(dt[at] * A)[:, None, None] * state + added
            out[at] = (state @ c[at, :, :, None])[..., 0] + D.unsqueeze(-1) * x[at]
        states.append(state)
    found = torch.stack(states).to(state_dtype)
    if final_states_out is not None:
        final_states_out[final_state_indices] = found
    return found


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    core_attn_out: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, T, H, V] outputs of gated delta nets' chunks and [R, H, V, K] their requests' states; g is a logarithm."""
    if use_qk_l2norm_in_kernel:
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    values_of_key = v.shape[2] // k.shape[2]
    q, k = (each[0].repeat_interleave(values_of_key, dim=1) for each in (q * q.shape[-1] ** -0.5, k))
    out, states = torch.empty_like(v), initial_state.clone()
    for request, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        for at in range(start, stop):
            state = states[request] * torch.exp(g[0, at])[:, None, None]
            change = beta[0, at, :, None] * (v[0, at] - (state @ k[at, :, :, None])[..., 0])
            states[request] = state = state + change[:, :, None] * k[at, :, None, :]
            out[0, at] = (state @ q[at, :, :, None])[..., 0]
    if core_attn_out is not None:
        core_attn_out.view(-1)[: out.numel()].copy_(out.view(-1))
    return out, states
