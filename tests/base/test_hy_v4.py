"""HY V4: sparse attention (DSA) with sinks and an output gate, hyper-connections, experts that clamp; equal to
transformers in float32."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import engine
from safetensors.torch import save_file
from test_latent_attention import check, largest_error
from test_sparse_attention import INDEXER, KEYS, NEW_TOKENS, OPTIONS, check_arrivals, check_batches
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs

from model_runner_base.testing.architectures import UNTIED, hf
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import metric
from model_runner_base.testing.models import OF_TRANSFORMERS, TinyModel, vary
from model_runner_base.testing.reference import logits_after

pytestmark = pytest.mark.newest
PROMPTS = random_prompts(140, [1, 5, 16, 17, 33, 90, 130, 200])
LATENT, ROTARY, LENGTH = 24, 8, 256
"""Numbers of a latent and of a rotary key, and the longest request."""
SIZES = {
    **UNTIED,
    **INDEXER,
    "q_lora_rank": 20,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROTARY,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full", "shared", "full"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-6,  # vLLM's class has 1e-6 in an indexer's norm, transformers in norms of latents.
    "pad_token_id": None,
}
BLOCK_BYTES = 16 * (3 * (LATENT + ROTARY) + 2 * INDEXER["index_head_dim"]) * 4
"""Bytes of a cache block: latents and rotary keys of three layers, and keys of two indexers."""
PUBLISHED = {
    r"\.attn_hc\.": ".hc_attn_layer.hc_pre.hc_",
    r"\.ffn_hc\.": ".hc_mlp_layer.hc_pre.hc_",
    r"\.hc_head\.hc_": ".hc_head.hc_head_",
    r"\.self_attn\.sinks$": ".self_attn.learnable_sink_param",
    r"\.self_attn\.gate_proj\.": ".self_attn.linear_gate.",
}
"""Names of tensors in transformers' class, and in a published checkpoint."""
ROTATED = {
    r"q_b_proj": UNTIED["num_attention_heads"],
    r"kv_a_proj_with_mqa": 1,
    r"indexer\.wq_b": INDEXER["index_n_heads"],
    r"indexer\.(wk|k_norm)": 1,
}
"""Layers whose results have a rotary part in each head, at its end; and their numbers of heads."""


def in_pairs(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of transformers', which rotates halves of a head's rotary part, as vLLM's class reads it, which rotates
    pairs of neighbours."""
    for pattern, num_heads in ROTATED.items():
        if re.search(rf"\.{pattern}\.(weight|bias)$", name):
            heads = tensor.unflatten(0, (num_heads, -1))
            rest, rotary = heads.split((heads.shape[1] - ROTARY, ROTARY), dim=1)
            pairs = torch.stack(rotary.chunk(2, dim=1), dim=2).flatten(1, 2)
            return torch.cat((rest, pairs), dim=1).flatten(0, 1)
    return tensor


def make_model(path: Path, **changes: Any) -> TinyModel:
    """A checkpoint under published names, and the same for transformers, with ``changes`` of config or weights."""
    sinks = changes.pop("sinks", None)
    config = hf.HYV4Config(**SIZES | changes)
    config.architectures = ["HYV4ForCausalLM"]
    torch.manual_seed(5)
    model = hf.HYV4ForCausalLM(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(tensor, std=0.1)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(tensor, std=2.0)
        elif isinstance(tensor, torch.nn.Parameter):
            vary(name, tensor)
        if sinks is not None and name.endswith("sinks"):
            torch.nn.init.constant_(tensor, sinks)
        if name.endswith("experts.gate_up_proj"):
            tensor.data *= 3  # So that many numbers exceed the limit.
    tensors = {}
    for name, tensor in model.state_dict().items():
        for pattern, replacement in PUBLISHED.items():
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor.contiguous()
    (own := path / OF_TRANSFORMERS).mkdir(parents=True)
    for directory, place in ((own, lambda _, tensor: tensor), (path, in_pairs)):
        config.save_pretrained(directory)
        save_file({name: place(name, x).contiguous() for name, x in tensors.items()}, directory / "model.safetensors")
    return TinyModel(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model(tmp_path_factory.mktemp("hy-v4") / "sparse")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The same weights, with an indexer that leaves all keys."""
    return make_model(tmp_path_factory.mktemp("hy-v4") / "dense", index_topk=LENGTH)


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Iterator[LLM]:
    """An engine whose cache holds some 400 tokens, so that long requests preempt each other."""
    memory = 26 * BLOCK_BYTES
    with engine(model.path, max_model_len=LENGTH, block_size=16, kv_cache_memory_bytes=memory, **OPTIONS) as llm:
        yield llm


def test_what_the_reference_depends_on(model: TinyModel, dense: TinyModel, tmp_path: Path) -> None:
    """Keys are hidden after ``KEYS`` tokens, and not before; sinks and the limit of experts matter from the first."""
    tokens = PROMPTS[-1]
    want = logits_after(model, tokens)
    error = np.abs(want - logits_after(dense, tokens)).max(axis=1)
    assert error[:KEYS].max() < 1e-4 and np.median(error[KEYS:]) > 0.1
    for name, changes in {"sinks": {"sinks": -1e9}, "limit": {"swiglu_limit": 1e9}}.items():
        error = np.abs(want - logits_after(make_model(tmp_path / name, **changes), tokens)).max(axis=1)
        assert np.median(error) > 0.1, name


def test_equals_transformers(llm: LLM, model: TinyModel) -> None:
    check_batches(llm, model, PROMPTS)


def test_arrivals_and_resets(llm: LLM, model: TinyModel) -> None:
    check_arrivals(llm, model, PROMPTS)


def test_drafts_in_pieces(model: TinyModel) -> None:
    """Decode rows of several tokens, each with keys of its own; attention works in pieces of one pair."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    options = OPTIONS | {"speculative_config": drafts, "additional_config": {"attention_memory_gib": 1e-6}}
    with engine(model.path, max_model_len=LENGTH, **options) as llm:
        check(llm, model, PROMPTS[-4:], NEW_TOKENS)
        assert metric(llm, "vllm:spec_decode_num_drafts") > 0


def test_an_indexer_that_leaves_all_keys(dense: TinyModel) -> None:
    """Attention is dense, and has sinks all the same."""
    with engine(dense.path, max_model_len=LENGTH, **OPTIONS) as llm:
        assert largest_error(llm, dense, PROMPTS) < 2e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "not cut over ranks"),
        ({"enable_lora": True}, "leave out enable_lora"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "drafts by mtp are not supported"),
        ({"hf_overrides": {"gating_type": "headwise"}}, "served as published, which has gating_type otherwise"),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}}, "rotary positions of type lin"),
        ({"hf_overrides": {"layer_types": None}}, "layer 0 of HY V4 see all keys, .* with layer_types of 3 times"),
        ({"hf_overrides": {"indexer_types": ["shared"] * 3}}, "first layer has no earlier layer"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, model: TinyModel) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(model.path), skip_tokenizer_init=True, max_model_len=LENGTH, **options).create_engine_config()
