"""Tiny configurations of every decoder architecture of vLLM that transformers builds from classes of its own.

Sizes are the smallest at which a feature still shows: several layers where layers take turns, a sliding window shorter
than the prompts, more experts than a token chooses, fewer KV heads than heads.
"""

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PretrainedConfig

# Typed loosely: transformers loads its classes on demand, and many a signature says less than the class takes.
hf: Any = transformers

VOCAB_SIZE = 512
MAX_LENGTH = 512
WINDOW = 40
SHORT_WINDOW = 20
"""Window that is shorter than all but the shortest prompts of the profile smoke."""
CHUNK = 24
"""Tokens of a chunk of attention; not a multiple of blocks of 16, nor of KV tiles."""

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    **TOKENS,
}
UNTIED = {**SHAPE, "tie_word_embeddings": False}
_NO_GROUPS = {**UNTIED, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ALTERNATING = ["sliding_attention", "full_attention"]
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_LENGTH, **TOKENS}
_BLOOM = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4, **TOKENS}
_FALCON = {name: value for name, value in UNTIED.items() if name != "num_key_value_heads"} | {"ffn_hidden_size": 256}
_MLA = {"q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_LATENT = {**_NO_GROUPS, **_MLA, **_DEEPSEEK, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
_LATENT_V3 = _LATENT | {"q_lora_rank": 20, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}
_MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}

Configs = dict[str, Callable[[], PretrainedConfig]]

LLAMAS: Configs = {
    "llama": lambda: hf.LlamaConfig(**UNTIED),
    "qwen2": lambda: hf.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: hf.Qwen3Config(**UNTIED, head_dim=32),
    "mistral": lambda: hf.MistralConfig(**UNTIED, head_dim=16, sliding_window=None),
    "mistral-window": lambda: hf.MistralConfig(**UNTIED, head_dim=16, sliding_window=WINDOW),
    "gemma": lambda: hf.GemmaConfig(**(SHAPE | {"num_key_value_heads": 1}), head_dim=32),
    "apertus": lambda: hf.ApertusConfig(**UNTIED),
    "arcee": lambda: hf.ArceeConfig(**UNTIED),
    "ernie4_5": lambda: hf.Ernie4_5Config(**UNTIED, head_dim=16),
    "exaone4": lambda: hf.Exaone4Config(
        **UNTIED | {"num_hidden_layers": 4}, sliding_window=WINDOW, sliding_window_pattern=2
    ),
    "glm": lambda: hf.GlmConfig(**UNTIED, head_dim=16),
    "glm4": lambda: hf.Glm4Config(**UNTIED, head_dim=16),
    "granite": lambda: hf.GraniteConfig(
        **SHAPE, embedding_multiplier=6.0, logits_scaling=4.0, residual_multiplier=0.5, attention_multiplier=0.1
    ),
    "helium": lambda: hf.HeliumConfig(**UNTIED, head_dim=16),
    "hunyuan-dense": lambda: hf.HunYuanDenseV1Config(**UNTIED, head_dim=16, use_qk_norm=True),
    "nemotron": lambda: hf.NemotronConfig(**UNTIED, partial_rotary_factor=0.5),
    "olmo": lambda: hf.OlmoConfig(**_NO_GROUPS, clip_qkv=2.0),
    "olmo2": lambda: hf.Olmo2Config(**UNTIED),
    "persimmon": lambda: hf.PersimmonConfig(**_NO_GROUPS, partial_rotary_factor=0.5),
    "phi": lambda: hf.PhiConfig(**_NO_GROUPS | {"intermediate_size": 256}, partial_rotary_factor=0.5),
    "phi3": lambda: hf.Phi3Config(**UNTIED),
    "seed-oss": lambda: hf.SeedOssConfig(**UNTIED, head_dim=16),
    "smollm3": lambda: hf.SmolLM3Config(**SHAPE | {"num_hidden_layers": 4}, no_rope_layer_interval=2),
    "stablelm": lambda: hf.StableLmConfig(**UNTIED, partial_rotary_factor=0.25, use_qkv_bias=True),
    "starcoder2": lambda: hf.Starcoder2Config(**SHAPE, sliding_window=WINDOW),
}

GPTS: Configs = {
    "gpt2": lambda: hf.GPT2Config(**_GPT2),
    "gpt-bigcode": lambda: hf.GPTBigCodeConfig(**_GPT2, multi_query=True),
    "gpt-j": lambda: hf.GPTJConfig(**_GPT2, rotary_dim=8, tie_word_embeddings=False),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**_NO_GROUPS, rotary_pct=0.25),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        word_embed_proj_dim=64,
        **TOKENS,
    ),
    "bloom": lambda: hf.BloomConfig(**_BLOOM),
    "mpt": lambda: hf.MptConfig(
        vocab_size=VOCAB_SIZE, d_model=64, n_heads=4, n_layers=2, max_seq_len=MAX_LENGTH, expansion_ratio=4, **TOKENS
    ),
    "falcon": lambda: hf.FalconConfig(**_FALCON, multi_query=True, parallel_attn=True, alibi=False),
    "falcon-new": lambda: hf.FalconConfig(**_FALCON, num_kv_heads=2, new_decoder_architecture=True, alibi=False),
    "falcon-alibi": lambda: hf.FalconConfig(**_FALCON, multi_query=False, parallel_attn=False, alibi=True),
}

SEVERAL_GROUPS: Configs = {
    "gemma2": lambda: hf.Gemma2Config(
        **SHAPE | {"num_hidden_layers": 4},
        head_dim=32,
        sliding_window=WINDOW,
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=32,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=15.0,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **UNTIED | {"num_hidden_layers": 3},
        head_dim=32,
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **SHAPE | {"num_hidden_layers": 4, "intermediate_size": [128] * 4},
        head_dim=32,
        sliding_window=WINDOW,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        num_kv_shared_layers=2,
        layer_types=_ALTERNATING * 2,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
    ),
    "cohere": lambda: hf.CohereConfig(**SHAPE, logit_scale=0.25, use_qk_norm=True),
    "cohere2": lambda: hf.Cohere2Config(
        **SHAPE | {"num_hidden_layers": 4}, logit_scale=0.25, sliding_window=WINDOW, layer_types=_ALTERNATING * 2
    ),
    "olmo3": lambda: hf.Olmo3Config(
        **UNTIED | {"num_hidden_layers": 4}, sliding_window=WINDOW, layer_types=_ALTERNATING * 2
    ),
    "gpt-oss": lambda: hf.GptOssConfig(
        **UNTIED | {"intermediate_size": 64, "num_hidden_layers": 4},
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING * 2,
        rope_scaling=_YARN | {"truncate": False},
    ),
}

MIXTURES: Configs = {
    "mixtral": lambda: hf.MixtralConfig(**UNTIED, num_local_experts=8, num_experts_per_tok=2),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(**UNTIED, **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**UNTIED, **EXPERTS, head_dim=32, norm_topk_prob=True),
    "olmoe": lambda: hf.OlmoeConfig(**UNTIED, num_experts=8, num_experts_per_tok=2),
    "flex-olmo": lambda: hf.FlexOlmoConfig(**UNTIED, num_experts=8, num_experts_per_tok=2),
    "granite-moe": lambda: hf.GraniteMoeConfig(
        **SHAPE, num_local_experts=8, num_experts_per_tok=2, embedding_multiplier=6.0, attention_multiplier=0.2
    ),
    "granite-moe-shared": lambda: hf.GraniteMoeSharedConfig(
        **SHAPE, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=64, attention_multiplier=0.2
    ),
    "granite-moe-hybrid": lambda: hf.GraniteMoeHybridConfig(
        **SHAPE,
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        attention_multiplier=0.2,
        layer_types=["attention", "attention"],
        position_embedding_type="rope",
    ),
    "phimoe": lambda: hf.PhimoeConfig(
        **UNTIED, attention_bias=True, lm_head_bias=True, num_local_experts=8, num_experts_per_tok=2
    ),
    "dbrx": lambda: hf.DbrxConfig(
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=MAX_LENGTH,
        vocab_size=VOCAB_SIZE,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2, "moe_jitter_eps": 0.0},
        **TOKENS,
    ),
    "dots1": lambda: hf.Dots1Config(
        **UNTIED,
        **_DEEPSEEK,
        moe_intermediate_size=32,
        head_dim=16,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        moe_layer_freq=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
    "glm4-moe": lambda: hf.Glm4MoeConfig(
        **UNTIED, **_DEEPSEEK, moe_intermediate_size=32, head_dim=16, first_k_dense_replace=1, use_qk_norm=True
    ),
    "ernie4_5-moe": lambda: hf.Ernie4_5_MoeConfig(
        **UNTIED,
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "hunyuan-moe": lambda: hf.HunYuanMoEV1Config(
        **UNTIED,
        num_experts=8,
        moe_topk=2,
        head_dim=16,
        use_qk_norm=True,
        moe_intermediate_size=128,
        use_mixed_mlp_moe=True,
        num_shared_expert=1,
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **UNTIED | {"intermediate_size": 32},
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=8,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=CHUNK,
        use_qk_norm=True,
    ),
}

LATENT: Configs = {
    "deepseek-v2": lambda: hf.DeepseekV2Config(**_LATENT, topk_method="group_limited_greedy"),
    "deepseek-v3": lambda: hf.DeepseekV3Config(**_LATENT_V3, rope_scaling=_YARN | _MSCALE),
    "kimi-k2": lambda: hf.DeepseekV3Config(**_LATENT_V3 | {"n_group": 1}),
}
"""Architectures with latent attention (MLA)."""

INDEXER = {"index_topk": MAX_LENGTH, "index_head_dim": 16, "index_n_heads": 2}
"""An indexer that leaves a token all keys (sparse attention, DSA)."""

_LONGCAT = {"zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
"""Fields of a checkpoint of LongCat-Flash that vLLM reads, and transformers has as constants."""

LATENT_LATER: Configs = {
    "glm4-moe-lite": lambda: hf.Glm4MoeLiteConfig(**_LATENT_V3 | {"n_group": 1}),
    "deepseek-v3.2": lambda: hf.DeepseekV32Config(**_LATENT_V3, **INDEXER),
    "longcat-flash": lambda: hf.LongcatFlashConfig(
        **_NO_GROUPS | _MLA | {"num_hidden_layers": 4, "q_lora_rank": 16},
        **_LONGCAT,
        head_dim=_MLA["qk_rope_head_dim"],
        num_layers=2,
        n_routed_experts=8,
        zero_expert_num=4,
        moe_topk=3,
        ffn_hidden_size=128,
        expert_ffn_hidden_size=32,
        routed_scaling_factor=1.5,
    ),
    "glm-5": lambda: hf.GlmMoeDsaConfig(**_LATENT_V3 | {"n_group": 1}, **INDEXER),
}
"""More of them, in later releases of transformers."""

SPARSE: Configs = {
    "glm-5-sparse": lambda: hf.GlmMoeDsaConfig(
        **_LATENT_V3 | {"n_group": 1, "num_hidden_layers": 3},
        **INDEXER | {"index_topk": 16, "index_n_heads": 16},
        mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["indexed_attention"] * 3,
        indexer_types=["full", "shared", "full"],
        indexer_rope_interleave=True,
        index_topk_freq=2,
        index_skip_topk_offset=1,
    ),
}
"""Sparse attention (DSA) to a few keys: layers with an indexer of their own, and one that takes another's choice. Of so
many heads, since relu makes zeros of many products, and equal scores of few heads would not be rare."""

GEMMA4 = {
    **UNTIED,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 15.0,
}

LATER: Configs = {
    "gemma4": lambda: hf.Gemma4TextConfig(**GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True),
    "gemma4-shared": lambda: hf.Gemma4TextConfig(
        **GEMMA4 | {"hidden_size_per_layer_input": 16},
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "gemma4-moe": lambda: hf.Gemma4TextConfig(
        **GEMMA4, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=32
    ),
    "cohere2-moe": lambda: hf.Cohere2MoeConfig(
        **SHAPE | {"num_hidden_layers": 4, "intermediate_size": 32},
        head_dim=16,
        num_experts=8,
        logit_scale=0.25,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING * 2,
    ),
}
"""Architectures of later releases of transformers: layers of two head sizes, one whose values are its keys, KV caches
shared by layers, experts beside a dense layer, experts in a block with windows."""

MIMO_V2 = {
    **UNTIED,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
_OF_VLLM_ALONE = {
    "hybrid_layer_pattern": [0, 1] * 2,
    "moe_layer_freq": [0, 1, 1, 1],
    "layernorm_epsilon": 1e-5,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "add_swa_attention_sink_bias": True,
}
"""Fields of a checkpoint of MiMo-V2 that vLLM reads, and transformers has by other names or as constants."""

UNEQUAL_HEADS: Configs = {"mimo-v2": lambda: hf.MiMoV2FlashConfig(**MIMO_V2, **_OF_VLLM_ALONE)}
"""Architectures of later releases of transformers whose keys and values differ in head size."""

REFUSED: Configs = {"longcat-flash": LATENT_LATER["longcat-flash"]}
"""Architectures that run with later releases of vLLM alone, and that this transformers has a class for."""

CONFIGS: Configs = {**LLAMAS, **GPTS, **SEVERAL_GROUPS, **MIXTURES}
"""The architectures that run."""

_SIX_HEADS = {**UNTIED, "num_attention_heads": 6, "hidden_size": 96}
HEADS: Configs = {
    "three-heads-a-group": lambda: hf.LlamaConfig(**_SIX_HEADS, head_dim=80),
    "large-scores": lambda: hf.LlamaConfig(**UNTIED),
    "unusual-scalars": lambda: hf.LlamaConfig(**UNTIED, rms_norm_eps=1e-3, rope_theta=500.0),
    "scales": lambda: hf.GraniteConfig(
        **UNTIED,
        rms_norm_eps=1e-3,
        embedding_multiplier=6.0,
        residual_multiplier=0.5,
        attention_multiplier=0.6,
        logits_scaling=0.4,
    ),
    "interleaved-rotary": lambda: hf.Glm4Config(
        **UNTIED, head_dim=16, rms_norm_eps=1e-3, rope_theta=500.0, partial_rotary_factor=0.5
    ),
    "short-window": lambda: hf.MistralConfig(**UNTIED, head_dim=16, rms_norm_eps=1e-3, sliding_window=SHORT_WINDOW),
}
"""Models with numbers of heads, head sizes, scores, scalars and windows that the other configurations do not have."""

SCALED = {"large-scores": {"q_proj": 40.0}}
"""Factors of weights, by a part of their names: the exponential of a score is then infinite."""

IGNORED_BY_VLLM = {"phimoe": "lm_head.bias", "gemma3n": "model.embed_tokens_per_layer.weight"}
"""Tensors that vLLM's model loads and leaves out; zero here, so that the reference leaves them out too."""

VLLM_NAMES = {"phimoe": "PhiMoEForCausalLM"}
"""Names in vLLM's registry of architectures whose class in transformers has another name."""
