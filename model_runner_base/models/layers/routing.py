"""Choice of experts for each token: vLLM's routers in plain torch.

The routers themselves call kernels that not every device has. So only their settings are read, and the choice is
computed here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

from model_runner_base.vllm_compat.probes.experts import ZeroExpertRouter

ROUTERS = (FusedTopKRouter, FusedTopKBiasRouter, GroupedTopKRouter, ZeroExpertRouter)
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


def check_router(layer: Any) -> None:
    """Raises NotImplementedError for a router that ``select_experts`` would get wrong."""
    router = layer.router
    if type(router) is CustomRoutingRouter:
        return
    if type(router) not in ROUTERS:
        raise NotImplementedError(f"{layer.layer_name}: {type(router).__name__} is not supported in plain torch")
    if (kind := getattr(router, "zero_expert_type", "identity")) != "identity":
        raise NotImplementedError(f"{layer.layer_name}: zero experts of type {kind} are not supported in plain torch")
    if router.scoring_func not in SCORES:
        raise NotImplementedError(f"{layer.layer_name}: expert scores by {router.scoring_func} are not supported")
    groups = getattr(router, "num_expert_group", 1)
    if layer.global_num_experts % groups or layer.global_num_experts <= groups:
        raise NotImplementedError(f"{layer.layer_name}: {layer.global_num_experts} experts do not make {groups} groups")


def select_experts(
    layer: Any, hidden_states: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and ids of each token's experts, both [T, top-k], from ``logits`` [T, experts].

    Where a table has the experts of each token (DeepSeek V4's first layers), ``token_ids`` [T] choose them.
    """
    router = layer.router
    if isinstance(router, CustomRoutingRouter):
        weights, ids = router.custom_routing_function(
            hidden_states=hidden_states, gating_output=logits, topk=router.top_k, renormalize=router.renormalize
        )
        return weights.float(), ids
    # The bias affects only the choice. It is read from the layer, with which it has moved to the device.
    bias = layer.e_score_correction_bias
    scores = SCORES[router.scoring_func](logits.float())
    choice = scores if bias is None else scores + bias
    if isinstance(router, GroupedTopKRouter):
        choice = _within_best_groups(choice, router.num_expert_group, router.topk_group, 1 if bias is None else 2)
    if (table := layer.experts_of_tokens) is None:
        ids = choice.topk(router.top_k, dim=-1).indices
    else:
        assert token_ids is not None, "the model gave its experts no token ids"
        ids = table[token_ids].long()
    weights = scores.gather(1, ids)
    if router.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0), ids


def _within_best_groups(choice: torch.Tensor, num_groups: int, top_groups: int, best: int) -> torch.Tensor:
    """Sets experts outside each token's best groups to -inf; a group's worth is the sum of its ``best`` best scores."""
    grouped = choice.view(choice.shape[0], num_groups, -1)
    worth = grouped.topk(best, dim=-1).values.sum(dim=-1)
    chosen = worth.topk(top_groups, dim=-1).indices
    groups = torch.arange(num_groups, device=choice.device)
    is_chosen = (chosen.unsqueeze(-1) == groups).any(dim=1)
    return torch.where(is_chosen.unsqueeze(-1), grouped, -torch.inf).view(choice.shape)
