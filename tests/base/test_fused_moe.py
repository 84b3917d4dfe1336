"""Mixture-of-experts layers in plain torch against NumPy, one token and one expert at a time."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

from model_runner_base.models.layers import fused_moe
from model_runner_base.models.layers.fused_moe import Experts, run_experts, tile_places
from model_runner_base.models.layers.routing import check_router, select_experts
from model_runner_base.step.rounds import loops_run_by, unrolled
from model_runner_base.vllm_compat.probes.experts import ExpertsView

HIDDEN, INNER = 6, 5


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * torch.special.ndtr(torch.from_numpy(x)).numpy()


def clamped_swiglu(inner: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(inner[0::2], 7), np.clip(inner[1::2], -7, 7)
    return gate * sigmoid(1.702 * gate) * (up + 1)


def clamped_swiglu_of_halves(inner: np.ndarray) -> np.ndarray:
    return clamped_swiglu(np.stack((inner[:INNER], inner[INNER:]), axis=-1).ravel())


def stepped_swiglu(inner: np.ndarray) -> np.ndarray:
    gate, up = inner[:INNER], inner[INNER:]
    return np.minimum(gate * sigmoid(gate), 7) * np.clip(up, -7, 7)


def limited_silu(inner: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(inner[:INNER], 10), np.clip(inner[INNER:], -10, 10)
    return gate * sigmoid(gate) * up


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


ACTIVATIONS = {
    "gelu_tanh": lambda inner: gelu_tanh(inner[:INNER]) * inner[INNER:],
    "silu": lambda inner: inner[:INNER] * sigmoid(inner[:INNER]) * inner[INNER:],
    "gelu": lambda inner: gelu(inner[:INNER]) * inner[INNER:],
    "silu_limited": limited_silu,
    "swigluoai": clamped_swiglu,
    "swigluoai_uninterleave": clamped_swiglu_of_halves,
    "swiglustep": stepped_swiglu,
    "silu_no_mul": lambda inner: inner * sigmoid(inner),
    "gelu_no_mul": gelu,
    "gelu_tanh_no_mul": gelu_tanh,
    "relu2_no_mul": lambda inner: np.maximum(inner, 0) ** 2,
}


def one_by_one(experts: Experts, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    arrays = {name: value.double().numpy() for name, value in experts._asdict().items() if torch.is_tensor(value)}
    out = np.zeros(hidden.shape)
    for token, row in enumerate(hidden.astype(np.float64)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            inner = row @ arrays["gate_up"][expert]
            if "gate_up_bias" in arrays:
                inner = inner + arrays["gate_up_bias"][expert]
            result = ACTIVATIONS[experts.activation](inner) @ arrays["down"][expert]
            if "down_bias" in arrays:
                result = result + arrays["down_bias"][expert]
            out[token] += weight * result
    return out


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    """Number of experts, and the experts of each token: distinct ones, of which some are popular."""
    num_experts = draw(st.integers(1, 40))
    top_k = draw(st.integers(1, min(4, num_experts)))
    num_tokens = draw(st.sampled_from([1, 2, 3, 16, 64, 65, 100]))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    popularity = rng.dirichlet(np.full(num_experts, draw(st.sampled_from([0.05, 1.0, 100.0])))) + 1e-9
    popularity /= popularity.sum()
    ids = [rng.choice(num_experts, top_k, replace=False, p=popularity) for _ in range(num_tokens)]
    return num_experts, np.array(ids)


SHARES = st.sampled_from([0.0, 0.5, 1.0])
"""Share of the choices that other ranks run (expert parallelism), whose weight is 0 here."""


@given(
    choices(),
    st.sampled_from(list(ACTIVATIONS)),
    st.booleans(),
    st.sampled_from([1, 1000, 1 << 25]),
    st.booleans(),
    SHARES,
)
@settings(max_examples=examples(60), deadline=None)
def test_experts_equal_one_by_one(
    case: tuple[int, np.ndarray],
    activation: str,
    has_bias: bool,
    memory: int,
    is_traced: bool,
    share_of_others: float,
) -> None:
    """Whether the weights of one expert at a time fit the memory, or of several, or of all."""
    num_experts, ids = case
    rng = np.random.default_rng(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    width = INNER if activation.endswith("_no_mul") else 2 * INNER
    biases = (random(num_experts, width), random(num_experts, HIDDEN)) if has_bias else ()
    experts = Experts(random(num_experts, HIDDEN, width), random(num_experts, INNER, HIDDEN), activation, *biases)
    hidden, weights = random(len(ids), HIDDEN), random(*ids.shape)
    weights[torch.from_numpy(rng.random(ids.shape) < share_of_others)] = 0.0
    want = one_by_one(experts, hidden.numpy(), ids, weights.numpy())
    ways = [run_experts, fused_moe._each_choice, fused_moe._every_expert, fused_moe._in_tiles]
    for way in ways:
        with (
            patch.object(fused_moe, "GATHERED_AT_ONCE", memory),
            loops_run_by(unrolled) if is_traced else nullcontext(),
        ):
            got = way(experts, hidden, torch.from_numpy(ids), weights)
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4, err_msg=way.__name__)


@given(choices(), st.integers(1, 9), SHARES)
@settings(max_examples=examples(100), deadline=None)
def test_every_choice_gets_a_row_of_its_own_expert(
    case: tuple[int, np.ndarray], tile: int, share_of_others: float
) -> None:
    num_experts, ids = case
    is_of_others = np.random.default_rng(1).random(ids.size) < share_of_others
    flat = np.where(is_of_others, num_experts, ids.ravel())
    num_tiles = (len(flat) + num_experts * (tile - 1)) // tile
    place, tile_expert, num_used = (
        x.numpy() for x in tile_places(torch.from_numpy(flat), num_experts, tile, num_tiles)
    )
    has_row = flat < num_experts
    assert len(set(place[has_row])) == has_row.sum() and (place[~has_row] == num_tiles * tile).all()
    place = place[has_row]
    assert (place < num_used * tile).all() and num_used <= num_tiles
    assert (tile_expert[place // tile] == flat[has_row]).all()


def test_no_weights_of_unchosen_experts_reach_the_result() -> None:
    """An unchosen expert may make NaN of a token, which must not reach the result."""
    gate_up, down = torch.ones(4, HIDDEN, 2 * INNER), torch.ones(4, INNER, HIDDEN)
    gate_up[3] = torch.nan
    ids = torch.tensor([[0, 1]] * 70)
    for num_tokens in (1, 10, 70):
        out = run_experts(
            Experts(gate_up, down, "silu"), torch.ones(num_tokens, HIDDEN), ids[:num_tokens], torch.ones(num_tokens, 2)
        )
        assert torch.isfinite(out).all(), num_tokens


def layer_with(**router_options: Any) -> Any:
    bias = router_options.get("e_score_correction_bias")
    router = create_fused_moe_router(**router_options)
    return SimpleNamespace(
        router=router,
        e_score_correction_bias=bias,
        experts_of_tokens=None,
        layer_name="experts",
        global_num_experts=router_options["global_num_experts"],
    )


@given(
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    has_bias=st.booleans(),
    groups=st.sampled_from([None, (4, 2), (2, 1), (1, 1)]),
    scale=st.sampled_from([1.0, 2.5]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(150), deadline=None)
def test_routing_equals_brute_force(
    scoring: str, renormalize: bool, has_bias: bool, groups: tuple[int, int] | None, scale: float, seed: int
) -> None:
    num_experts, top_k = 12, 3
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, num_experts)).astype(np.float32)
    bias = rng.normal(size=num_experts).astype(np.float32) if has_bias else None
    grouping = {"use_grouped_topk": True, "num_expert_group": groups[0], "topk_group": groups[1]} if groups else {}
    layer = layer_with(
        top_k=top_k,
        global_num_experts=num_experts,
        renormalize=renormalize,
        scoring_func=scoring,
        routed_scaling_factor=scale,
        e_score_correction_bias=None if bias is None else torch.from_numpy(bias),
        **grouping,
    )
    check_router(layer)
    weights, ids = select_experts(layer, torch.zeros(5, 1), torch.from_numpy(logits))
    # vLLM's plain router knows no scaling: models that want it there scale the sum themselves.
    is_scaled = has_bias or (groups and (groups[0] > 1 or scoring == "sigmoid"))
    for token in range(5):
        row = logits[token].astype(np.float64)
        scores = sigmoid(row) if scoring == "sigmoid" else np.exp(row) / np.exp(row).sum()
        choice = scores if bias is None else scores + bias
        allowed = range(num_experts)
        if groups:
            by_group = [sorted(part, reverse=True) for part in np.split(choice, groups[0])]
            worth = [sum(part[: 1 if bias is None else 2]) for part in by_group]
            best = sorted(range(groups[0]), key=lambda group: -worth[group])[: groups[1]]
            allowed = [expert for expert in allowed if expert // (num_experts // groups[0]) in best]
        want = sorted(allowed, key=lambda expert: -choice[expert])[:top_k]
        assert set(ids[token].tolist()) == set(want)
        total = sum(scores[expert] for expert in want) if renormalize else 1.0
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            assert weight == pytest.approx(scores[expert] / total * (scale if is_scaled else 1.0), rel=1e-4)


def test_custom_routing_function_is_called() -> None:
    def first_two(hidden_states: Any, gating_output: torch.Tensor, topk: int, renormalize: bool) -> Any:
        return gating_output[:, :topk].half(), torch.arange(topk).expand(len(gating_output), topk)

    layer = layer_with(top_k=2, global_num_experts=4, custom_routing_function=first_two)
    weights, ids = select_experts(layer, torch.zeros(3, 1), torch.ones(3, 4))
    assert weights.dtype == torch.float32 and ids.tolist() == [[0, 1]] * 3


def test_refused_routers_say_why() -> None:
    uneven = layer_with(
        top_k=1, global_num_experts=6, use_grouped_topk=True, num_expert_group=4, topk_group=2, scoring_func="sigmoid"
    )
    with pytest.raises(NotImplementedError, match="6 experts do not make 4 groups"):
        check_router(uneven)
    with pytest.raises(NotImplementedError, match="scores by tanh"):
        check_router(layer_with(top_k=1, global_num_experts=6, scoring_func="tanh"))


@pytest.mark.parametrize("by_token", [False, True])
def test_scores_by_sqrtsoftplus(by_token: bool) -> None:
    """Experts of the best scores, or of a table by token id; weights are scores without the bias either way."""
    num_experts, top_k, scale, tokens = 12, 3, 1.5, [3, 0, 19, 3, 7]
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(len(tokens), num_experts)).astype(np.float32)
    bias = rng.normal(size=num_experts).astype(np.float32)
    table = rng.permuted(np.tile(np.arange(num_experts), (20, 1)), axis=1)[:, :top_k]
    layer = layer_with(
        top_k=top_k,
        global_num_experts=num_experts,
        renormalize=True,
        routed_scaling_factor=scale,
        e_score_correction_bias=torch.from_numpy(bias),
    )
    layer.router.scoring_func = "sqrtsoftplus"  # Older releases make no such router.
    layer.experts_of_tokens = torch.from_numpy(table) if by_token else None
    check_router(layer)
    weights, ids = select_experts(layer, torch.zeros(5, 1), torch.from_numpy(logits), torch.tensor(tokens))
    scores = np.sqrt(np.log1p(np.exp(logits.astype(np.float64))))
    for row, token in enumerate(tokens):
        want = table[token] if by_token else np.argsort(-(scores[row] + bias))[:top_k]
        assert ids[row].tolist() == want.tolist()
        of_token = scores[row][want]
        np.testing.assert_allclose(weights[row].numpy(), scale * of_token / of_token.sum(), rtol=1e-4)


def test_a_table_that_is_not_the_gates_is_refused() -> None:
    table = torch.zeros(20, 3, dtype=torch.int32)
    gate = SimpleNamespace()
    module = SimpleNamespace(activation="silu", router=SimpleNamespace(_hash_indices_table=table), gate=gate)
    module.routed_experts = module
    assert ExpertsView(module).asks_for_more == "hash routing"
    gate.tid2eid = table
    assert ExpertsView(module).asks_for_more is None
