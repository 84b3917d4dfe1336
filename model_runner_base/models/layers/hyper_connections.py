"""Manifold-constrained hyper-connections (mHC; DeepSeek V4) in plain torch, in place of vLLM's operations.

A token has n residual streams x_i, of D numbers each. A block reads one stream, a weighted sum of them, and its output
is added to all of them. With z the streams side by side, over their root mean square:

    (a, b, C) = fn z, of n, n and n * n numbers, each scaled, and with a bias added
    input of the block = sum of (sigmoid(a_i) + eps) x_i
    new x_j = 2 sigmoid(b_j) output + sum over i of M_ij x_i

M is softmax(C), made doubly stochastic by turns: columns are divided by their sums, then rows.
"""

from typing import Any

import torch
from torch import nn


def use_plain_connections(model: nn.Module) -> None:
    """Makes vLLM's operations of hyper-connections in a loaded model run in plain torch, one by one: where a library of
    kernels is installed, a decoder layer would join some of them."""
    forwards = {"MHCPreOp": before_block, "MHCPostOp": after_block, "HCHeadOp": at_head}
    for module in model.modules():
        if hasattr(module, "use_fused_mhc"):
            decoder_layer: Any = module
            decoder_layer.use_fused_mhc = False
        if (forward := forwards.get(type(module).__name__)) is not None:
            layer: Any = module
            layer.forward = forward


def _mixes(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """[T, N] float32 products of ``fn`` [N, n * D] with the streams [T, n, D], over their root mean square."""
    flat = streams.flatten(1).float()
    return (flat @ fn.t()) * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + eps)


def _collapsed(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights.unsqueeze(-1) * streams.float()).sum(dim=1).to(streams.dtype)


def before_block(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of a block's output [T, n, 1] and of the streams [T, n, n], both float32, and the input [T, D].

    ``residual`` [T, n, D] are the streams.
    """
    num = residual.shape[1]
    before, after, matrix = _mixes(residual, fn, rms_eps).split((num, num, num * num), dim=1)
    of_before, of_after, of_matrix = hc_base.split((num, num, num * num))
    before = torch.sigmoid(before * hc_scale[0] + of_before) + hc_pre_eps
    after = torch.sigmoid(after * hc_scale[1] + of_after) * hc_post_mult_value
    matrix = (matrix * hc_scale[2] + of_matrix).unflatten(1, (num, num)).softmax(dim=2) + hc_sinkhorn_eps
    matrix = matrix / (matrix.sum(dim=1, keepdim=True) + hc_sinkhorn_eps)
    for _turn in range(sinkhorn_repeat - 1):
        matrix = matrix / (matrix.sum(dim=2, keepdim=True) + hc_sinkhorn_eps)
        matrix = matrix / (matrix.sum(dim=1, keepdim=True) + hc_sinkhorn_eps)
    return after.unsqueeze(2), matrix, _collapsed(residual, before)


def after_block(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """The new streams [T, n, D], of a block's output [T, D] and the streams before it, by their weights."""
    mixed = torch.matmul(comb_res_mix.transpose(1, 2), residual.float())
    return (mixed + post_layer_mix * x.unsqueeze(1).float()).to(residual.dtype)


def at_head(
    hidden_states: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Weighted sum [T, D] of the last streams [T, n, D]."""
    weights = torch.sigmoid(_mixes(hidden_states, hc_fn, rms_norm_eps) * hc_scale + hc_base) + hc_eps
    return _collapsed(hidden_states, weights)
