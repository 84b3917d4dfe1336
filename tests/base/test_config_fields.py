"""A config that lacks what vLLM's class of its model reads ends the start with the fields and their published values.

The configs have what transformers needs, and were found by building each class of vLLM's registry from such a one.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lane import HAS_OPENXLA
from torch import nn
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

from model_runner_base.admission.config_fields import PUBLISHED
from model_runner_base.errors import CheckpointError
from model_runner_base.models import loader
from model_runner_base.testing.architectures import EXPERTS, SHAPE, UNTIED, hf
from model_runner_base.testing.engine import shut_down

_NO_GROUPS = {**UNTIED, "num_key_value_heads": 4}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_MLA = {"kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 16, "num_local_experts": 0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "AfmoeForCausalLM": (
        "afmoe",
        {**UNTIED, **EXPERTS, "head_dim": 16, "num_dense_layers": 1},
        {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "DbrxForCausalLM": (
        "dbrx",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "vocab_size": 512},
        {"attn_config": {"rope_theta": 500000}},
    ),
    "Dots1ForCausalLM": (
        "dots1",
        {**_NO_GROUPS, **_ROUTED, "head_dim": 16, "first_k_dense_replace": 1, "n_shared_experts": 1},
        {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "Gemma2ForCausalLM": ("gemma2", {**SHAPE, "head_dim": 16}, {"hidden_act": "gelu_pytorch_tanh"}),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        {**UNTIED, **_ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 1},
        {"head_dim": 16},
    ),
    "Glm4MoeLiteForCausalLM": (
        "glm4_moe_lite",
        {**_NO_GROUPS, **_ROUTED, **_MLA, "n_shared_experts": 1},
        {"first_k_dense_replace": 1},
    ),
    "HYV3ForCausalLM": (
        "hy_v3",
        {**UNTIED, **EXPERTS, "head_dim": 16, "num_shared_experts": 1},
        {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True, "qk_norm": True},
    ),
    "KimiLinearForCausalLM": (
        "kimi_linear",
        {
            **_NO_GROUPS,
            **_MLA,
            "q_lora_rank": None,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 32,
            "linear_attn_config": {
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
                "kda_layers": [1],
                "full_attn_layers": [2],
            },
        },
        {"mla_use_nope": True, "first_k_dense_replace": 1},
    ),
    "Lfm2ForCausalLM": (
        "lfm2",
        {**SHAPE, "layer_types": ["conv", "full_attention"]},
        {"conv_dim": 64, "block_dim": 64, "block_ff_dim": 128},
    ),
    "LongcatFlashForCausalLM": (
        "longcat_flash",
        {
            **{name: value for name, value in _NO_GROUPS.items() if name != "num_hidden_layers"},
            **_MLA,
            "head_dim": 8,
            "num_layers": 2,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
            "moe_topk": 3,
            "ffn_hidden_size": 128,
            "expert_ffn_hidden_size": 32,
        },
        {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    ),
    "MiMoV2FlashForCausalLM": (
        "mimo_v2_flash",
        {**UNTIED, **_ROUTED, "num_attention_heads": 8, "head_dim": 24, "v_head_dim": 16, "sliding_window": 41},
        {
            "hybrid_layer_pattern": [0, 1],
            "moe_layer_freq": [0, 1],
            "layernorm_epsilon": 1e-5,
            "sliding_window_size": 40,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 24,
            "swa_v_head_dim": 16,
            "add_swa_attention_sink_bias": True,
            "rope_theta": 5e6,
            "swa_rope_theta": 1e4,
            "partial_rotary_factor": 0.334,
        },
    ),
    "MiniMaxM2ForCausalLM": (
        "minimax_m2",
        {**UNTIED, **_LOCAL, "head_dim": 16, "intermediate_size": 32},
        {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
}
"""Type of a config by its architecture, with sizes, and the fields with the values that make it start."""
WITHOUT_VALUE = {
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", {**SHAPE, **_MAMBA}, ["mamba", "attention"]),
    "Lfm2MoeForCausalLM": ("lfm2_moe", {**SHAPE, **EXPERTS, "num_dense_layers": 1}, ["conv", "full_attention"]),
}
"""The same for ``layer_types``, whose values no other field tells."""
IN_OLDER = ["Dots1", "Gemma2", "Glm4Moe", "KimiLinear", "Lfm2"]
IN_NEWER = [
    *("Afmoe", "Dbrx", "Glm4Moe", "Glm4MoeLite", "HYV3", "KimiLinear", "Lfm2", "LongcatFlash", "MiMoV2Flash"),
    "MiniMaxM2",
]
LACKING = [f"{name}ForCausalLM" for name in (IN_OLDER if HAS_OPENXLA else IN_NEWER)]
"""Architectures whose class in this release of vLLM reads more than this release of transformers has defaults for."""


@pytest.fixture(scope="module", autouse=True)
def parallel_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The groups of one rank, in which models are built without an engine."""
    file = tmp_path_factory.mktemp("groups") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{file}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    shut_down()


def configure(directory: Path, architecture: str, **overrides: Any) -> VllmConfig:
    """Config of an engine for a checkpoint that has what its config needs, and no weights."""
    model_type, sizes, *_ = {**CASES, **WITHOUT_VALUE}[architecture]
    config = {"architectures": [architecture], "model_type": model_type, **sizes}
    (directory / "config.json").write_text(json.dumps(config))
    options = {"load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
    return EngineArgs(str(directory), hf_overrides=overrides, **options).create_engine_config()


def build(config: VllmConfig) -> nn.Module:
    with set_current_vllm_config(config):
        return loader.load_checkpoint(config)


@pytest.mark.parametrize("architecture", LACKING)
def test_fields_and_their_published_values(architecture: str, tmp_path: Path) -> None:
    """The sentence has all fields, and the model starts with the overrides that it gives."""
    fields = CASES[architecture][2]
    with pytest.raises(CheckpointError, match=f"cannot load checkpoint .*vLLM's {architecture} reads") as raised:
        build(configure(tmp_path, architecture))
    message = str(raised.value)
    assert "\n" not in message
    names = [f"{name}.{inner}" for name, value in fields.items() if isinstance(value, dict) for inner in value]
    names = names or [*fields]
    assert all(f"{name} ({PUBLISHED[architecture][name].words})" in message for name in names)
    overrides = json.loads(message.partition("--hf-overrides '")[2].removesuffix("'"))
    assert overrides == fields
    assert isinstance(build(configure(tmp_path, architecture, **overrides)), nn.Module)


@pytest.mark.parametrize("architecture", ["GraniteMoeHybridForCausalLM"] if HAS_OPENXLA else ["Lfm2MoeForCausalLM"])
def test_a_field_whose_value_no_other_tells(architecture: str, tmp_path: Path) -> None:
    layer_types = WITHOUT_VALUE[architecture][2]
    with pytest.raises(CheckpointError, match=r"lacks layer_types \(.* for each layer .*'{\"layer_types\": VALUE}'"):
        build(configure(tmp_path, architecture))
    assert isinstance(build(configure(tmp_path, architecture, layer_types=layer_types)), nn.Module)


def test_a_default_that_does_not_fit(tmp_path: Path) -> None:
    """vLLM makes the first layer of experts then, and finds no place for a weight: its error is said first."""
    config = configure(tmp_path, "KimiLinearForCausalLM", mla_use_nope=True)
    error = KeyError("layers.0.mlp.gate_proj.weight")
    message = r"'layers\.0\.mlp\.gate_proj\.weight'; its config\.json lacks first_k_dense_replace \(1 in Kimi-Linear, "
    with mock.patch.object(loader, "get_model", side_effect=error), pytest.raises(CheckpointError, match=message):
        build(config)
    config = configure(tmp_path, "KimiLinearForCausalLM", mla_use_nope=True, first_k_dense_replace=0)
    with mock.patch.object(loader, "get_model", side_effect=error), pytest.raises(CheckpointError) as raised:
        build(config)
    assert "lacks" not in str(raised.value)


@pytest.mark.parametrize(("place", "override"), [("", '{"of": VALUE}'), ("inner.", '{"inner": {"of": VALUE}}')])
def test_a_field_that_is_in_no_table(place: str, override: str, tiny_model: Any) -> None:
    """A class of a later release, or of a plugin, may read anything."""
    config = EngineArgs(str(tiny_model("llama").path), max_model_len=64).create_engine_config()
    hf_config = config.model_config.hf_config
    hf_config.inner = hf.Qwen2Config(**SHAPE)
    read = hf_config if not place else hf_config.inner

    def get_model(*args: Any, **kwargs: Any) -> Any:
        return read.of

    message = f"lacks {place}of, which vLLM's LlamaForCausalLM reads: add it, as published .*'{re.escape(override)}'$"
    with mock.patch.object(loader, "get_model", get_model), pytest.raises(CheckpointError, match=message) as raised:
        loader.load_checkpoint(config)
    assert isinstance(raised.value.__cause__, AttributeError)


@pytest.mark.parametrize(
    "fault",
    [
        lambda: nn.Module().no_such_layer,
        lambda: hf.BertConfig().of,
        lambda: None.of,  # type: ignore[attr-defined]
        lambda: len(1),  # type: ignore[arg-type]
    ],
    ids=["module", "config of another model", "none", "type"],
)
def test_faults_of_code_stay(fault: Any, tiny_model: Any) -> None:
    """Errors of other objects pass as they were raised, so that their traceback shows the place."""
    config = EngineArgs(str(tiny_model("llama").path), max_model_len=64).create_engine_config()
    with (
        mock.patch.object(loader, "get_model", side_effect=lambda *args, **kwargs: fault()),
        pytest.raises((AttributeError, TypeError)) as raised,
    ):
        loader.load_checkpoint(config)
    assert type(raised.value) in (AttributeError, TypeError)
