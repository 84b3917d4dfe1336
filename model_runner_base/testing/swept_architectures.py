"""More architectures of later releases of transformers, which only the sweep runs (testing/sweep.py)."""

from model_runner_base.testing.architectures import EXPERTS, SHAPE, UNTIED, WINDOW, Configs, hf

_FOUR = {"num_hidden_layers": 4}
_TURNS = ["sliding_attention", "full_attention"] * 2
_WINDOWS = {**_FOUR, "sliding_window": WINDOW, "layer_types": _TURNS}
_GRANITE = {**SHAPE, **_WINDOWS, "attention_multiplier": 0.2, "layer_rope_theta": [1e4] * 4}
_DENSE_FIRST = ["dense", "sparse"]

SWEPT: Configs = {
    "ministral3": lambda: hf.Ministral3Config(**UNTIED, head_dim=16, sliding_window=None),
    "cwm": lambda: hf.CwmConfig(**UNTIED | _WINDOWS, head_dim=16),
    "jais2": lambda: hf.Jais2Config(**UNTIED, head_dim=16),
    "vaultgemma": lambda: hf.VaultGemmaConfig(**SHAPE | _WINDOWS, head_dim=16, query_pre_attn_scalar=16),
    "hyperclovax": lambda: hf.HyperCLOVAXConfig(**UNTIED, head_dim=16, attention_multiplier=0.2),
    "granite-swa": lambda: hf.GraniteSWAConfig(**_GRANITE),
    "granite-moe-swa": lambda: hf.GraniteMoeSWAConfig(
        **_GRANITE, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=64
    ),
    "minimax-m2": lambda: hf.MiniMaxM2Config(
        **UNTIED | {"intermediate_size": 32},
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        rotary_dim=8,
        scoring_func="sigmoid",
        use_qk_norm=True,
        use_routing_bias=True,
        num_mtp_modules=0,
    ),
    "afmoe": lambda: hf.AfmoeConfig(
        **UNTIED | _WINDOWS,
        **EXPERTS,
        head_dim=16,
        num_dense_layers=1,
        num_shared_experts=1,
        score_func="sigmoid",
        route_norm=True,
        n_group=1,
        topk_group=1,
        global_attn_every_n_layers=2,
    ),
    "exaone-moe": lambda: hf.ExaoneMoeConfig(
        **UNTIED | _WINDOWS,
        **EXPERTS,
        mlp_layer_types=["dense", *["sparse"] * 3],
        num_shared_experts=1,
        is_moe_layer=[False, True, True, True],
        scoring_func="sigmoid",
        sliding_window_pattern="LG",
    ),
    "hy-v3": lambda: hf.HYV3Config(
        **UNTIED,
        **EXPERTS,
        head_dim=16,
        mlp_layer_types=_DENSE_FIRST,
        first_k_dense_replace=1,
        num_shared_experts=1,
        qk_norm=True,
        moe_router_enable_expert_bias=True,
        route_norm=True,
        moe_router_use_sigmoid=True,
        expert_hidden_dim=32,
        enable_lm_head_fp32=False,
    ),
    "mellum": lambda: hf.MellumConfig(
        **UNTIED | _WINDOWS,
        head_dim=16,
        moe_intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        mlp_layer_types=["sparse"] * 4,
    ),
    "kolibri1": lambda: hf.Kolibri1Config(
        **{name: value for name, value in (UNTIED | _WINDOWS).items() if name != "intermediate_size"},
        head_dim=16,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "laguna": lambda: hf.LagunaConfig(
        **UNTIED | _WINDOWS,
        **EXPERTS,
        head_dim=16,
        shared_expert_intermediate_size=32,
        moe_routed_scaling_factor=2.5,
    ),
    "minimax-m3": lambda: hf.MiniMaxM3VLTextConfig(
        **UNTIED | {"intermediate_size": 32},
        head_dim=16,
        rotary_dim=8,
        dense_intermediate_size=128,
        shared_intermediate_size=32,
        mlp_layer_types=_DENSE_FIRST,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "youtu": lambda: hf.YoutuConfig(
        # Transformers zeroes the padding token's row of its embeddings, vLLM does not (``no_reference.py``).
        **SHAPE | {"num_key_value_heads": 4, "pad_token_id": None},
        tie_word_embeddings=True,
        kv_lora_rank=24,
        q_lora_rank=20,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(
        **UNTIED | {"num_key_value_heads": 4},
        kv_lora_rank=24,
        q_lora_rank=20,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        dim_model_base=16,
    ),
}
"""Layers with windows and without, experts of several routers, gated attention, norms after blocks, muP."""
