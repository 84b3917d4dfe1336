"""Forwards of vLLM's recurrent layers that call the base's recurrences, and replace the layers' own after loading.

A device with kernels of its own replaces the two functions of a kind in ``RECURRENCES``, and no layer.
"""

import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.recurrent.delta_rule import (
    channel_delta_rows,
    channel_delta_tiles,
    delta_rows,
    delta_tiles,
)
from model_runner_base.models.recurrent.mamba import mamba1_rows, mamba1_tiles, mamba2_rows, mamba2_tiles
from model_runner_base.models.recurrent.operations import convolve
from model_runner_base.models.recurrent.step import RecurrentStep, TileSteps
from model_runner_base.vllm_compat.types.recurrent import is_delta_net, state_shapes

TILES_AT_ONCE = 8
"""Largest number of chunk tiles that a layer computes at a time; the maps of a tile take many times the memory of a
state."""


def tiles_at_once(dtype: torch.dtype) -> float:
    """Number of chunk tiles that a layer with states of ``dtype`` computes at a time.

    States of less than float32 would be rounded between two pieces. Where that is in a request depends on other
    requests, so their tiles are computed at once.
    """
    return TILES_AT_ONCE if dtype == torch.float32 else math.inf


class Recurrence(NamedTuple):
    """A kind of recurrence, as one function for decode rows and one for chunks.

    Both take ``inputs`` ([T, ...] each, the first of the output's shape), the layer's ``params``, and ``states``
    [S, ...], which they read and update in place.
    """

    rows: Callable[..., torch.Tensor]
    """Outputs of decode rows, one token each: ``rows(inputs, params, states, step)``, where ``step`` is a
    ``DecodeSteps``. Where drafts are verified it is called for the rows' first tokens, then for their second ones, and
    so on."""
    tiles: Callable[..., torch.Tensor]
    """Outputs of chunks, cut into tiles: ``tiles(inputs, params, states, step.tiles)``."""

    def run(
        self,
        inputs: tuple[torch.Tensor, ...],
        params: tuple[torch.Tensor, ...],
        states: torch.Tensor,
        step: RecurrentStep,
    ) -> torch.Tensor:
        """[T, ...] outputs of all tokens of a step, decode rows first."""
        return step.run(
            inputs,
            lambda values, rows: self.rows(values, params, states, rows),
            lambda values, tiles: self.run_tiles(values, params, states, tiles),
        )

    def run_tiles(
        self,
        inputs: tuple[torch.Tensor, ...],
        params: tuple[torch.Tensor, ...],
        states: torch.Tensor,
        tiles: TileSteps,
    ) -> torch.Tensor:
        """[C, ...] outputs of chunks, computed ``tiles_at_once`` tiles at a time."""
        if tiles.states.shape[0] <= tiles_at_once(states.dtype):
            return self.tiles(inputs, params, states, tiles)
        outs = [self.tiles(inputs, params, states, piece) for piece in tiles.pieces(TILES_AT_ONCE)]
        return torch.cat(outs)[tiles.slots]


RECURRENCES: dict[str, Recurrence] = {
    "mamba1": Recurrence(mamba1_rows, mamba1_tiles),
    "mamba2": Recurrence(mamba2_rows, mamba2_tiles),
    "gated delta rule": Recurrence(delta_rows, delta_tiles),
    "channel delta rule": Recurrence(channel_delta_rows, channel_delta_tiles),
    "lightning attention": Recurrence(mamba2_rows, mamba2_tiles),
}
"""Kinds of recurrences; a device may replace them before a model is loaded."""


def use_plain_recurrences(model: nn.Module) -> None:
    """Replaces the forward of every recurrent layer of a loaded model, on the instance.

    Raises UnsupportedConfigError for a kind of layer that there is no recurrence for.
    """
    for name, module in model.named_modules():
        if isinstance(module, MambaBase):
            layer: Any = module
            layer.forward = MethodType(forward_of(name, layer), layer)
            layer.is_plain = True
            # A view of the convolution's weight: moved to a device, it would be a tensor of its own.
            layer._buffers.pop("conv_weights", None)
            if isinstance(slopes := layer.__dict__.pop("tp_slope", None), torch.Tensor):
                layer.register_buffer("tp_slope", slopes, persistent=False)  # To be moved to a device, too.


def is_plain(layer: Any) -> bool:
    """Whether the base's recurrences have replaced a recurrent layer's own forward, which calls vLLM's kernels."""
    return getattr(layer, "is_plain", False)


def forward_of(name: str, layer: object) -> Callable[..., Any]:
    """Forward of a layer by its class; raises UnsupportedConfigError for one that is not known."""
    for cls in type(layer).__mro__:
        if cls.__name__ in FORWARDS:
            return FORWARDS[cls.__name__]
    raise UnsupportedConfigError(f"layer {name} is a {type(layer).__name__}, which is not supported yet")


def state_tensors(layer: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor that a layer keeps of a request.

    First the inputs of its convolution if it has one, in the model's dtype, then the state of its recurrence, in
    ``mamba_ssm_cache_dtype``: float32 unless it is given. A layer that calls vLLM's kernels says itself what it keeps.
    """
    if not is_plain(layer):
        return list(zip(map(tuple, layer.get_state_shape()), layer.get_state_dtype(), strict=True))
    convolutions, recurrences = state_shapes(layer)
    if is_delta_net(layer):  # Keys before values, so that a product with a key needs no transpose.
        recurrences = [(heads, key, value) for heads, value, key in recurrences]
    asked = layer.cache_config.mamba_ssm_cache_dtype if recurrences else "auto"
    dtype = torch.float32 if asked == "auto" else STR_DTYPE_TO_TORCH_DTYPE[asked]
    conv_dtype = layer.model_config.dtype
    return [*((shape, conv_dtype) for shape in convolutions), *((shape, dtype) for shape in recurrences)]


def _step_of(layer: Any) -> RecurrentStep | None:
    """Metadata of the layer in this step; None while memory is measured, when there are no states."""
    metadata: Any = get_forward_context().attn_metadata
    return None if metadata is None else metadata[layer.prefix]


def states_of(layer: Any) -> Sequence[torch.Tensor]:
    """The tensors of a layer's states, in the order of ``state_tensors``."""
    cache = layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache
    return (cache,) if isinstance(cache, torch.Tensor) else cache


def _convolve(layer: Any, conv: Any, x: torch.Tensor) -> torch.Tensor:
    return _convolve_by(layer, conv.weight, conv.bias, x)


def _convolve_by(layer: Any, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    step = _step_of(layer)
    return x if step is None else convolve(x, weight, bias, states_of(layer)[0], step)


def _recur(layer: Any, kind: str, inputs: tuple[torch.Tensor, ...], *params: torch.Tensor) -> torch.Tensor:
    step = _step_of(layer)
    return inputs[0] if step is None else RECURRENCES[kind].run(inputs, params, states_of(layer)[-1], step)


# ---- Forwards, by vLLM's classes ----


def short_conv(self: Any, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
    """LFM2's gated short convolution."""
    b, c, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
    output.copy_(self.out_proj(c * _convolve(self, self.conv, b * x))[0])


def mamba1(self: Any, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
    """Mamba's block."""
    x, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
    x = F.silu(_convolve(self, self.conv1d, x))
    dt, b, c = self._ssm_transform(x)
    # vLLM returns dt transposed, as its kernels read it.
    dt = F.softplus(dt.transpose(-2, -1).float() + self._time_proj_bias())
    x = x.float()
    out = _recur(self, "mamba1", (x, dt, b.float(), c.float()), self.A)
    out = (out + self.D.float() * x) * F.silu(gate.float())
    output.copy_(self.out_proj(out.to(hidden_states.dtype))[0])


def mamba2(self: Any, hidden_states: torch.Tensor, mup_vector: torch.Tensor | None = None) -> torch.Tensor:
    """Mamba 2's block; ``mup_vector`` scales what is projected."""
    projected = self.in_proj(hidden_states)[0]
    if mup_vector is not None:
        projected = projected * mup_vector
    gate, mixed, dt = projected.split([self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size], dim=-1)
    mixed = F.silu(_convolve(self, self.conv1d, mixed))
    x, b, c = self.split_hidden_states_B_C_fn(mixed)
    num_groups = self.n_groups // self.tp_size
    x = x.float().view(x.shape[0], -1, self.head_dim)
    b, c = (each.float().view(each.shape[0], num_groups, -1) for each in (b, c))
    out = _recur(self, "mamba2", (x, F.softplus(dt.float() + self.dt_bias.float()), b, c), self.A)
    out = (out + self.D.float().unsqueeze(1) * x).flatten(1).to(hidden_states.dtype)
    return self.out_proj(self.norm.forward_native(out, gate))[0]


def gated_delta_net(self: Any, hidden_states: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor | None:
    """Gated delta net of Qwen3-Next and Qwen3.5; returned, or written to ``output`` where vLLM's layer does so."""
    qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
    if getattr(self, "gqa_interleaved_layout", True):  # By key heads, as in Qwen3-Next.
        *parts, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
        mixed = torch.cat([each.flatten(1) for each in parts], dim=-1)
    else:
        mixed, z = qkvz.split([self.conv_dim // self.tp_size, self.value_dim // self.tp_size], dim=-1)
        z = z.reshape(z.shape[0], -1, self.head_v_dim)
        b, a = ba.chunk(2, dim=-1)
    # The norm is computed in its inputs' dtype.
    out = self.norm.forward_native(_delta_rule(self, mixed, a, torch.sigmoid(b.float())), z.float())
    out = self.out_proj(out.flatten(1).to(hidden_states.dtype))[0]
    return out if output is None else output.copy_(out)


def olmo_gated_delta_net(self: Any, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
    """Gated delta net of OLMo Hybrid, which may write up to twice a correction."""
    sizes = [self.conv_dim // self.tp_size, self.value_dim // self.tp_size]
    mixed, gate = self.in_proj_qkvg(hidden_states)[0].split(sizes, dim=-1)
    beta = torch.sigmoid(self.b_proj(hidden_states)[0].float()) * (2 if self.allow_neg_eigval else 1)
    out = _delta_rule(self, mixed, self.a_proj(hidden_states)[0], beta)
    out = self.o_norm.forward_native(out, gate.reshape(out.shape).float())
    output.copy_(self.o_proj(out.flatten(1).to(hidden_states.dtype))[0])


def _delta_rule(self: Any, mixed: torch.Tensor, a: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """[T, H, V] float32 of the recurrence, from queries, keys and values ``mixed`` [T, D], ``a`` and ``beta``
    [T, H]."""
    mixed = F.silu(_convolve(self, self.conv1d, mixed)).float()
    num_keys, num_values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
    q, k, v = mixed.split([num_keys, num_keys, num_values], dim=-1)
    values_of_key = self.num_v_heads // self.num_k_heads
    q, k = (
        unit_length(each.view(each.shape[0], -1, self.head_k_dim)).repeat_interleave(values_of_key, dim=1)
        for each in (q, k)
    )
    v = v.view(v.shape[0], -1, self.head_v_dim)
    log = -torch.exp(self.A_log.float()) * F.softplus(a.float() + self.dt_bias.float())
    return _recur(self, "gated delta rule", (v, q * self.head_k_dim**-0.5, k, log, beta))


def kimi_delta_attention(
    self: Any, hidden_states: torch.Tensor, positions: torch.Tensor, output: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Kimi Delta Attention: a gated delta net whose decay is one for each channel of a key.

    Older releases of vLLM keep its projections and convolutions apart, and write to ``output``.
    """
    if hasattr(self, "in_proj_qkvgfab"):
        widths = [3 * self.local_projection_size, self.local_num_heads, self.head_dim]
        mixed, beta, decay = self.in_proj_qkvgfab(hidden_states)[0].split(widths, dim=-1)
        weight = self.conv1d.weight
    else:
        parts = (self.q_proj, self.k_proj, self.v_proj)
        mixed = torch.cat([part(hidden_states)[0] for part in parts], dim=-1)
        beta, decay = self.b_proj(hidden_states)[0], self.f_a_proj(hidden_states)[0]
        weight = torch.cat([conv.weight for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
    mixed = F.silu(_convolve_by(self, weight, None, mixed)).float()
    q, k, v = mixed.view(mixed.shape[0], 3, -1, self.head_dim).unbind(dim=1)
    rate = torch.exp(self.A_log.float()).view(-1, 1)
    log = -rate * F.softplus(self.f_b_proj(decay)[0].float() + self.dt_bias.float()).view_as(k)
    inputs = (v, unit_length(q) * self.head_dim**-0.5, unit_length(k), log, torch.sigmoid(beta.float()))
    gate = self.g_b_proj(self.g_a_proj(hidden_states)[0])[0].float().view_as(v)
    out = _root_mean_square(_recur(self, "channel delta rule", inputs), self.o_norm) * torch.sigmoid(gate)
    out = self.o_proj(out.flatten(1).to(hidden_states.dtype))[0]
    return out if output is None else output.copy_(out)


def _root_mean_square(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps) * norm.weight.float()


def lightning_attention(
    self: Any, hidden_states: torch.Tensor, output: torch.Tensor, positions: torch.Tensor | None = None
) -> None:
    """Lightning attention of MiniMax-Text-01: Mamba 2's recurrence with one decay for each head.

    Keys and queries are what a token writes and reads by (b and c), values are its inputs.
    """
    qkv = F.silu(self.qkv_proj(hidden_states)[0].float())
    q, k, v = qkv.view(qkv.shape[0], self.tp_heads, -1).split(self.head_dim, dim=-1)
    out = _recur(self, "lightning attention", (v, torch.ones_like(v[..., 0]), k, q), -self.tp_slope.flatten())
    out = torch.sigmoid(self.output_gate(hidden_states)[0]) * self.norm._forward(out.flatten(1))
    output.copy_(self.out_proj(out.to(hidden_states.dtype))[0])


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Vectors [..., N] of length 1, with the epsilon that transformers' kernels have."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


FORWARDS: dict[str, Callable[..., Any]] = {
    "ShortConv": short_conv,
    "MambaMixer": mamba1,
    "MambaMixer2": mamba2,
    "Qwen3NextGatedDeltaNet": gated_delta_net,
    "QwenGatedDeltaNetAttention": gated_delta_net,
    "OlmoHybridGatedDeltaNetAttention": olmo_gated_delta_net,
    "KimiDeltaAttention": kimi_delta_attention,
    "KimiGatedDeltaNetAttention": kimi_delta_attention,
    "MiniMaxText01LinearAttention": lightning_attention,
}
"""Forwards by the name of vLLM's class, whose module may fail to import on some release."""
