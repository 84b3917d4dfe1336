"""Tiny configurations of every architecture with recurrent layers that transformers builds from classes of its own.

Some exist in newer releases of transformers alone, and some in older releases of vLLM alone.
"""

from vllm import ModelRegistry

from model_runner_base.testing.architectures import EXPERTS, SHAPE, TOKENS, UNTIED, VOCAB_SIZE, Configs, hf

_IS_NEWER = hasattr(hf, "Qwen3_5TextConfig")
# Transformers 4 cannot write a checkpoint of several layers that share a block.
_ZAMBA2_LAYERS = ["mamba", "hybrid"] * (2 if _IS_NEWER else 1)
_MAMBA2 = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 1,  # Transformers norms several as one, published code and vLLM do not (``no_reference.py``).
    "chunk_size": 16,
    "num_hidden_layers": 2,
    **TOKENS,
}
_MAMBA = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, **TOKENS}

DELTA_NET = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_NO_FLOOR = {"time_step_min": 1e-30}
"""Least time step of transformers 5, so small that no step is below it: published code, its kernels and vLLM have no
such limit, so transformers would be no reference at such a step (``no_reference.py``)."""
_NEMOTRON = {
    **{name: value for name, value in UNTIED.items() if name != "num_hidden_layers"},
    "head_dim": 16,
    **_NO_FLOOR,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
}
_KDA = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1, 3], "full_attn_layers": [2]}

_IN_BOTH_LANES: Configs = {
    "lfm2": lambda: hf.Lfm2Config(
        **SHAPE,
        tie_word_embeddings=True,
        layer_types=["conv", "full_attention"],
        # vLLM reads what the published configurations have beside.
        conv_dim=64,
        conv_dim_out=64,
        block_dim=64,
        block_ff_dim=128,
    ),
    "mamba": lambda: hf.MambaConfig(**_MAMBA),
    "falcon-mamba": lambda: hf.FalconMambaConfig(**_MAMBA),
    "jamba": lambda: hf.JambaConfig(
        **SHAPE, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False
    ),
    "mamba2": lambda: hf.Mamba2Config(**_MAMBA2),
    "falcon-h1": lambda: hf.FalconH1Config(
        **SHAPE,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_chunk_size=16,
    ),
    "granite-hybrid": lambda: hf.GraniteMoeHybridConfig(
        **SHAPE,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        shared_intermediate_size=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_chunk_size=16,
    ),
    "qwen3-next": lambda: hf.Qwen3NextConfig(**UNTIED, **DELTA_NET, **EXPERTS),
    "zamba2": lambda: hf.Zamba2Config(
        **SHAPE | {"num_hidden_layers": len(_ZAMBA2_LAYERS), "num_key_value_heads": 4},
        layers_block_type=_ZAMBA2_LAYERS,
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=8,
        # Transformers 4 passes states wrongly from one chunk to the next, and takes minutes for long ones.
        chunk_size=16 if _IS_NEWER else 64,
        num_mem_blocks=1,
        adapter_rank=8,
        use_mem_rope=True,
        **_NO_FLOOR,
    ),
}

_IN_OLDER_VLLM: Configs = {
    "bamba": lambda: hf.BambaConfig(
        **SHAPE, attn_layer_indices=[1], attn_rotary_emb=8, mamba_n_heads=8, mamba_d_head=16, mamba_chunk_size=16
    ),
}

_IN_NEWER_TRANSFORMERS: Configs = {
    "lfm2-moe": lambda: hf.Lfm2MoeConfig(
        **SHAPE, **EXPERTS, tie_word_embeddings=True, num_dense_layers=1, layer_types=["conv", "full_attention"]
    ),
    "nemotron-h": lambda: hf.NemotronHConfig(**_NEMOTRON, layers_block_type=["mamba", "attention", "mlp"]),
    "nemotron-h-moe": lambda: hf.NemotronHConfig(
        **_NEMOTRON,
        layers_block_type=["mamba", "moe", "attention", "moe"],
        n_routed_experts=8,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "kimi-linear": lambda: hf.KimiLinearConfig(
        **UNTIED | {"num_hidden_layers": 3, "num_key_value_heads": 4},
        linear_attn_config=_KDA,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_group=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        # What vLLM's config reads, and transformers' has under other names.
        first_k_dense_replace=1,
        mla_use_nope=True,
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**UNTIED, **DELTA_NET),
    "qwen3_5-moe": lambda: hf.Qwen3_5MoeTextConfig(
        **UNTIED, **DELTA_NET, **EXPERTS, shared_expert_intermediate_size=64
    ),
}

_IN_NEWER_VLLM: Configs = {
    "olmo-hybrid": lambda: hf.OlmoHybridConfig(
        **UNTIED, **{name: value for name, value in DELTA_NET.items() if name != "head_dim"}
    ),
}

RECURRENT: Configs = {
    **_IN_BOTH_LANES,
    **(_IN_OLDER_VLLM if "BambaForCausalLM" in ModelRegistry.get_supported_archs() else {}),
    **(_IN_NEWER_TRANSFORMERS if _IS_NEWER else {}),
    **(_IN_NEWER_VLLM if "OlmoHybridForCausalLM" in ModelRegistry.get_supported_archs() else {}),
}
"""Architectures with recurrent layers that this lane has."""


EXERCISES = {
    "lfm2-moe": "gated short convolutions, experts: sigmoid with bias",
    "nemotron-h": "Mamba 2 and attention, squared ReLU",
    "nemotron-h-moe": "the same, experts: sigmoid with bias, squared ReLU without a gate, shared",
    "zamba2": "Mamba 2 after shared blocks of attention, adapters",
    "kimi-linear": "gated delta nets with decays of channels, latent attention without rotary positions; experts: "
    "sigmoid, bias, groups, shared; dense first layer",
    "qwen3_5": "gated delta nets and gated attention",
    "qwen3_5-moe": "the same with experts, shared",
    "olmo-hybrid": "gated delta nets with negative eigenvalues, attention without rotary positions",
    "lfm2": "gated short convolutions",
    "mamba": "Mamba, no attention",
    "falcon-mamba": "Mamba with norms of what a token selects, no attention",
    "jamba": "Mamba and attention, no rotary positions",
    "mamba2": "Mamba 2, no attention",
    "bamba": "Mamba 2 and attention",
    "falcon-h1": "Mamba 2 and attention in one layer, multipliers",
    "granite-hybrid": "Mamba 2 and attention, multipliers",
    "qwen3-next": "gated delta nets and gated attention, experts",
}
