"""Mixture-of-experts layers in plain torch, with static shapes and a cost that follows the chosen experts.

N = tokens x top-k choices meet E experts in one of three ways, by sizes that are known when a graph is made:

- few choices: each gathers the weights of its expert, so that only chosen experts are read;
- few tokens but more choices: nearly every expert is chosen by some token, and reading weights takes most of the time.
  So every expert runs on every token, and results that were not chosen are dropped;
- many tokens: choices are sorted into tiles of one expert, and each tile gathers its expert's weights once.
  With ``M = 1 + N // E`` places a tile, partly filled ones included, there are fewer than 2 E tiles and 2 N places.

Gathered weights would take the memory of all experts twice, so tiles are run some at a time (step/rounds.py), and the
rounds end with the last tile that has a choice.

A choice's place among those of its expert is a cumulative sum over a one-hot matrix: no sort, and no branch on data.

A choice of weight 0 adds nothing, and what its expert would make of it is not read; it has no place in a tile. With
expert parallelism these are the choices that other ranks run, and the layer sums the results of all ranks. A tile has
as many places as if the rank had all experts, so a rank with few of them has few places.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

from model_runner_base.models.layers.expert_exchange import EXCHANGE, ExpertExchange, RunExperts
from model_runner_base.models.layers.routing import check_router, select_experts
from model_runner_base.step.rounds import MOST_UNROLLED, OneNode, State, is_traced, is_unrolled, run_rounds
from model_runner_base.vllm_compat.probes.experts import (
    LIMITED_SILU,
    SILU_LIMIT,
    ExpertsView,
    activation_name,
    experts_layers,
)

GATHER_COST = 3
"""Cost of reading an expert's weights through a gather, as a multiple of reading them in place."""
MAX_DENSE_TOKENS = 64
"""Largest number of tokens for which reading an expert's weights takes longer than multiplying all tokens by them."""
GATHERED_AT_ONCE = 32 << 20
"""Bytes of weights that are gathered at a time, if that is more than one expert's. The C library of a host maps and
clears each larger array anew."""


def _gated(activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


def _clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """Computes GPT-OSS's activation: gate and up numbers alternate, and both are clamped."""
    return _clamped(x[..., ::2], x[..., 1::2])


def _clamped_swiglu_of_halves(x: torch.Tensor) -> torch.Tensor:
    """Computes the same of gate numbers that are followed by up numbers, as MiniMax M3 has them."""
    return _clamped(*x.chunk(2, dim=-1))


def _clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _limited_silu(x: torch.Tensor) -> torch.Tensor:
    """Computes HY V4's activation: SwiGLU of halves that are clamped first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=SILU_LIMIT)) * up.clamp(min=-SILU_LIMIT, max=SILU_LIMIT)


def _stepped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """Computes Step 3.5's activation: both halves are clamped, the gate after its function."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=7.0) * up.clamp(min=-7.0, max=7.0)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": partial(_gated, F.silu),
    LIMITED_SILU: _limited_silu,
    "gelu": partial(_gated, F.gelu),
    "gelu_tanh": partial(_gated, partial(F.gelu, approximate="tanh")),
    "swigluoai": _clamped_swiglu,
    "swigluoai_uninterleave": _clamped_swiglu_of_halves,
    "swiglustep": _stepped_swiglu,
    "silu_no_mul": F.silu,
    "gelu_no_mul": F.gelu,
    "gelu_tanh_no_mul": partial(F.gelu, approximate="tanh"),
    "relu2_no_mul": lambda x: F.relu(x).square(),
}


class Experts(NamedTuple):
    """The weights of E experts, laid out for ``inputs @ weight``."""

    gate_up: torch.Tensor
    """[E, hidden, 2 * inner]; [E, hidden, inner] where the activation has no gate."""
    down: torch.Tensor
    """[E, inner, hidden]"""
    activation: str
    gate_up_bias: torch.Tensor | None = None
    """[E, 2 * inner], or [E, inner]."""
    down_bias: torch.Tensor | None = None
    """[E, hidden]"""

    def take(self, ids: torch.Tensor) -> "Experts":
        """Copies the weights of the experts ``ids``."""
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[ids]
        down_bias = None if self.down_bias is None else self.down_bias[ids]
        return Experts(self.gate_up[ids], self.down[ids], self.activation, gate_up_bias, down_bias)

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Runs each expert on its own inputs [E, M, hidden], or all on the same ones [1, M, hidden]: [E, M, hidden]."""
        inner = torch.matmul(inputs, self.gate_up)
        if self.gate_up_bias is not None:
            inner = inner + self.gate_up_bias.unsqueeze(1)
        out = torch.matmul(ACTIVATIONS[self.activation](inner), self.down)
        return out if self.down_bias is None else out + self.down_bias.unsqueeze(1)


def run_experts(
    experts: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_all: int | None = None,
    further: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The weighted sum of each token's experts. ``hidden`` [T, hidden], ``ids`` and ``weights`` [T, top-k].

    Ids are below E. A choice of weight 0 adds nothing. ``num_all`` is the number of experts of all ranks, if that is
    another one (expert parallelism). ``further`` are tensors [T, ...] that ``experts.run`` takes after the inputs, with
    the same places.
    """
    num_tokens, top_k = ids.shape
    num_experts = experts.down.shape[0]
    if GATHER_COST * num_tokens * top_k <= num_experts:
        return _each_choice(experts, hidden, ids, weights, further)
    if num_tokens <= MAX_DENSE_TOKENS:
        return _every_expert(experts, hidden, ids, weights, further)
    return _in_tiles(experts, hidden, ids, weights, num_all, further)


def _each_choice(
    experts: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    further: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    inputs = [each.repeat_interleave(ids.shape[1], dim=0).unsqueeze(1) for each in (hidden, *further)]
    out = _run_tiles(experts, inputs, ids.reshape(-1), None)
    return _weighted_sum(out.squeeze(1), weights)


def _every_expert(
    experts: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    further: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    every = torch.arange(experts.down.shape[0], device=ids.device)
    # Selected, not multiplied by zero: what an expert makes of a token that did not choose it may overflow.
    weight_of = torch.where(ids.unsqueeze(-1) == every, weights.unsqueeze(-1), 0.0).sum(dim=1).t().unsqueeze(-1)
    inputs = [each.unsqueeze(0) for each in (hidden, *further)]
    out = torch.where(weight_of != 0, experts.run(*inputs), 0.0)
    return (out * weight_of.to(out.dtype)).sum(dim=0)


def _in_tiles(
    experts: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_all: int | None = None,
    further: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    top_k = ids.shape[1]
    num_choices = ids.shape[0] * top_k
    num_experts = experts.down.shape[0]
    num_tiles, tile = tiles_of(num_choices, num_experts, num_all)
    run_by = torch.where(weights == 0, num_experts, ids).reshape(-1)
    place, tile_expert, num_used = tile_places(run_by, num_experts, tile, num_tiles)
    choices = torch.arange(num_choices, device=ids.device)
    # Empty places hold the first token; their results are not read. A place after the last is for choices without one.
    token_at = torch.zeros(num_tiles * tile + 1, dtype=choices.dtype, device=ids.device)
    token_at = token_at.index_put((place,), choices // top_k)[:-1]
    inputs = [each[token_at].view(num_tiles, tile, -1) for each in (hidden, *further)]
    out = _run_tiles(experts, inputs, tile_expert, num_used)
    return _weighted_sum(out.view(num_tiles * tile, -1)[place.clamp(max=num_tiles * tile - 1)], weights)


def tiles_of(num_choices: int, num_experts: int, num_all: int | None = None) -> tuple[int, int]:
    """Number of tiles for so many choices of ``num_experts`` experts, and places of each; ``num_all`` as above."""
    tile = 1 + num_choices // (num_all or num_experts)
    return (num_choices + num_experts * (tile - 1)) // tile, tile


def tiles_at_once(num_tiles: int, expert_bytes: int, is_unrolled: bool) -> int:
    """Number of tiles that are run at a time, with experts of ``expert_bytes`` each."""
    least = -(-num_tiles // MOST_UNROLLED) if is_unrolled else 1
    return min(num_tiles, max(least, GATHERED_AT_ONCE // expert_bytes))


def _run_tiles(
    experts: Any, inputs: Sequence[torch.Tensor], tile_expert: torch.Tensor, num_used: torch.Tensor | None
) -> torch.Tensor:
    """[NT, M, hidden] outputs of tiles of inputs, of one expert each, ``tile_expert`` [NT].

    The first of ``inputs`` is [NT, M, hidden], others are [NT, M, ...]. Only the first ``num_used`` tiles, a scalar,
    have inputs that count; None: all of them.
    """
    num_tiles, num_inputs = len(tile_expert), len(inputs)
    make: Any = type(experts)
    weights = [value for value in experts if isinstance(value, torch.Tensor)]
    expert_bytes = sum(value.numel() * value.element_size() for value in weights) // weights[0].shape[0]
    size = tiles_at_once(num_tiles, expert_bytes, is_unrolled())
    if size == num_tiles:
        return experts.take(tile_expert).run(*inputs)

    def body(number: torch.Tensor, state: State, reads: State) -> State:
        inputs, (tile_expert, *weights) = reads[:num_inputs], reads[num_inputs:]
        of_reads = iter(weights)
        taken = [next(of_reads) if isinstance(value, torch.Tensor) else value for value in experts]
        index = (number * size + torch.arange(size, dtype=torch.int32, device=number.device)).clamp(max=num_tiles - 1)
        out = make(*taken).take(tile_expert[index]).run(*(each[index] for each in inputs))
        # A loop of a graph may not change its state in place; a copy in each round of an eager step would be slow.
        write = torch.Tensor.index_put if is_traced() else torch.Tensor.index_put_
        return (write(state[0], (index,), out),)

    used = torch.full((), num_tiles, device=tile_expert.device) if num_used is None else num_used
    rounds = ((used + size - 1) // size).to(torch.int32)
    state, reads = (torch.zeros_like(inputs[0]),), (*inputs, tile_expert, *weights)
    return run_rounds(rounds, -(-num_tiles // size), body, state, reads)[0]


def tile_places(
    experts: torch.Tensor, num_experts: int, tile: int, num_tiles: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts choices by expert into tiles of ``tile`` places.

    Args:
        experts: [N] the expert of each choice; ``num_experts`` for a choice that gets no place.
        num_tiles: at least ``(N + num_experts * (tile - 1)) // tile``, which is enough for any choice of experts.

    Returns:
        [N] the place of each choice, no two alike, and the one after the last for choices that get none; [num_tiles]
        the expert of each tile; a scalar, the number of tiles with choices, which are the first ones.
    """
    every = torch.arange(num_experts, device=experts.device)
    is_chosen = (experts.unsqueeze(-1) == every).to(torch.int32)
    rank = (is_chosen.cumsum(0) * is_chosen).sum(dim=1) - 1
    tiles = (is_chosen.sum(dim=0) + tile - 1) // tile
    end = tiles.cumsum(0)
    begin = F.pad(end - tiles, (0, 1))[experts]
    place = torch.where(experts < num_experts, begin * tile + rank, num_tiles * tile)
    index = torch.arange(num_tiles, device=experts.device)
    tile_expert = (index.unsqueeze(-1) >= end).sum(dim=1).clamp(max=num_experts - 1)
    return place, tile_expert, end[-1]


def _weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T * top-k, hidden] to [T, hidden]."""
    outputs, weights = outputs.view(*weights.shape, -1), weights.unsqueeze(-1).to(outputs.dtype)
    return torch.where(weights != 0, outputs * weights, 0.0).sum(dim=1)


# ---- vLLM's layer ----


class PlainExpertsMethod(UnquantizedFusedMoEMethod):
    """Keeps the weights in the layout of ``Experts``, also when they are loaded again."""

    experts_type: ClassVar[Any] = Experts
    """Type of what ``experts`` returns."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self._one_node = OneNode(self._run, torch.empty_like)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        keeps_loader = layer.expert_map is not None
        layer.w13_weight = _transposed(layer.w13_weight, keeps_loader)
        layer.w2_weight = _transposed(layer.w2_weight, keeps_loader)

    def experts(self, layer: Any) -> Experts:
        """The layer's weights. A device with its own layout returns its ``experts_type``, a ``NamedTuple`` for
        ``run_experts``, each of whose tensors has an entry for each expert."""
        has_bias = layer.moe_config.has_bias
        return Experts(
            layer.w13_weight,
            layer.w2_weight,
            activation_name(layer),
            layer.w13_bias if has_bias else None,
            layer.w2_bias if has_bias else None,
        )

    def run(self, layer: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns what ``run_experts`` does with the layer's experts; one node of a captured graph, since it loops."""
        num_all = None if layer.expert_map is None else len(layer.expert_map)
        return self._one_node(hidden, ids, weights, list(self.experts(layer)), num_all, self.further_inputs())

    def further_inputs(self) -> list[torch.Tensor]:
        """Tensors [T, ...] that ``run`` of the ``experts_type`` takes after hidden states; none by default."""
        return []

    def _run(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: Sequence[Any],
        num_all: int | None,
        further: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        return run_experts(self.experts_type(*experts), hidden, ids, weights, num_all, further)


def use_plain_experts(model: nn.Module) -> None:
    """Makes every mixture-of-experts layer of a loaded model run in plain torch.

    Raises NotImplementedError for a layer whose results would be wrong.
    """
    exchange = ExpertExchange()
    for _, layer in experts_layers(model):
        _check(layer)
        run = choose_and_run
        if layer.moe_config.dp_size > 1:
            setattr(model, EXCHANGE, exchange)
            run = partial(choose_and_run, run=exchange.around(run_own))
        layer.use(PlainExpertsMethod(layer.moe_config), run)


def _check(layer: ExpertsView) -> None:
    refusals = {
        f"quantised experts ({type(layer.quant_method).__name__})": (
            not isinstance(layer.quant_method, UnquantizedFusedMoEMethod)
        ),
        f"the {layer.activation} activation": layer.activation not in ACTIVATIONS,
        "sequence parallelism": layer.is_sequence_parallel,
        "a rank without experts (enable_expert_parallel)": layer.local_num_experts == 0,
        f"a forward of its own ({type(layer.module).__name__})": layer.has_own_forward,
        f"{layer.asks_for_more}": layer.asks_for_more is not None,
    }
    for what, is_asked in refusals.items():
        if is_asked:
            raise NotImplementedError(f"{layer.layer_name}: {what} is not supported in plain torch")
    check_router(layer)


def _transposed(weight: Any, keeps_loader: bool) -> Any:
    """The weight with its last two dimensions exchanged.

    ``keeps_loader`` is True for experts of one rank: while weights are loaded again, a model offers them those of other
    ranks after their own.
    """
    transposed: Any = nn.Parameter(weight.data.transpose(1, 2).contiguous(), requires_grad=False)
    if keeps_loader and hasattr(weight, "weight_loader"):
        transposed.weight_loader = weight.weight_loader
    return transposed


def run_own(layer: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the chosen experts that this rank has. ``hidden`` [T, hidden], ``ids`` and ``weights`` [T,
    top-k]."""
    if layer.expert_map is not None:
        own = layer.expert_map[ids.long()]
        weights, ids = torch.where(own < 0, 0.0, weights), own.clamp(min=0).to(ids.dtype)
    out: torch.Tensor = layer.quant_method.run(layer.weights, hidden, ids, weights)
    return out


def choose_and_run(
    layer: ExpertsView,
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    run: RunExperts = run_own,
) -> torch.Tensor:
    """The weighted sum of each token's routed experts. ``hidden`` [T, hidden], ``router_logits`` [T, experts]."""
    if layer.gate is not None:
        router_logits, _ = layer.gate(hidden)
    weights, ids = select_experts(layer, hidden, router_logits, token_ids)
    if (first := layer.first_zero_expert) is not None:
        returns_input = ids >= first
        share = torch.where(returns_input, weights, 0.0).sum(dim=1, keepdim=True)
        layer.add_after_reduction(hidden * share.to(hidden.dtype))
        weights, ids = torch.where(returns_input, 0.0, weights), torch.where(returns_input, 0, ids)
    if layer.apply_router_weight_on_input:
        hidden = hidden * weights.to(hidden.dtype)
        weights = torch.ones_like(weights)
    return run(layer, hidden, ids, weights)
