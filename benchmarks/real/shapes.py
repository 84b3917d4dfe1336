"""Configs of published models, by name; "4 layers" in a name says that the others are cut off."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_runner_base.testing.processed import hf, special_tokenizer
from model_runner_base.testing.tokenizer import make_tokenizer

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
QWEN3_SMALL = QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@dataclass(frozen=True)
class Shape:
    """A model's config, and what a client asks of it."""

    config: dict[str, Any]
    is_embedding: bool = False
    has_images: bool = False
    options: tuple[str, ...] = ()


def shapes() -> dict[str, Shape]:
    """Shapes by name; sizes are those of the models' published ``config.json``."""
    return {
        "Qwen3-0.6B": Shape(QWEN3_SMALL),
        "Llama-3.2-1B": Shape(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "vocab_size": 128256,
                "max_position_embeddings": 131072,
                "rope_theta": 500000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
            }
        ),
        "Qwen3-1.7B": Shape(QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144}),
        "Qwen3.5-0.8B": Shape(
            {
                "architectures": ["Qwen3_5ForCausalLM"],
                "model_type": "qwen3_5_text",
                "hidden_size": 1024,
                "intermediate_size": 3584,
                "num_hidden_layers": 24,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 16,
                "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 6,
                "vocab_size": 248320,
                "max_position_embeddings": 262144,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000000,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10],
                    "mrope_interleaved": True,
                },
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
            }
        ),
        "DeepSeek-V2-Lite, 4 layers": Shape(
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "hidden_size": 2048,
                "intermediate_size": 10944,
                "moe_intermediate_size": 1408,
                "num_hidden_layers": 4,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "kv_lora_rank": 512,
                "q_lora_rank": None,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "num_experts_per_tok": 6,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 1,
                "n_group": 1,
                "topk_group": 1,
                "topk_method": "greedy",
                "scoring_func": "softmax",
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.0,
                "vocab_size": 102400,
                "max_position_embeddings": 163840,
                "rope_theta": 10000,
                "rope_scaling": {
                    "type": "yarn",
                    "rope_type": "yarn",
                    "factor": 40,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 0.707,
                    "mscale_all_dim": 0.707,
                    "original_max_position_embeddings": 4096,
                },
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False,
            }
        ),
        "gpt-oss-20b, 4 layers": Shape(
            {
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_hidden_layers": 4,
                "layer_types": [SLIDING, FULL] * 2,
                "sliding_window": 128,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "attention_bias": True,
                "swiglu_limit": 7.0,
                "vocab_size": 201088,
                "max_position_embeddings": 131072,
                "rope_theta": 150000,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
                "quantization_config": {
                    "quant_method": "mxfp4",
                    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
                },
            }
        ),
        "Gemma-3-1B": Shape(
            {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "hidden_size": 1152,
                "intermediate_size": 6912,
                "num_hidden_layers": 26,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "sliding_window": 512,
                "sliding_window_pattern": 6,
                "layer_types": [FULL if (index + 1) % 6 == 0 else SLIDING for index in range(26)],
                "rope_theta": 1000000,
                "rope_local_base_freq": 10000,
                "vocab_size": 262144,
                "max_position_embeddings": 32768,
                "hidden_activation": "gelu_pytorch_tanh",
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
            }
        ),
        "Qwen2.5-VL-3B, 4 layers": Shape({}, has_images=True),
        "Qwen3-Embedding-0.6B": Shape(
            QWEN3_SMALL | {"vocab_size": 151669, "max_position_embeddings": 32768},
            is_embedding=True,
            options=("--runner", "pooling"),
        ),
    }


def write(shape: Shape, path: Path) -> None:
    """Writes what a server needs beside weights: a config and a tokenizer, or a processor."""
    if shape.has_images:
        _write_qwen2_5_vl(path)
        return
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(shape.config | tokens))
    make_tokenizer().save_pretrained(path)


def _write_qwen2_5_vl(path: Path) -> None:
    """The published sizes, but for the depth, with published pixels and a tokenizer of the kit's."""
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = special_tokenizer(*names)
    start, end, image, video = tokenizer.convert_tokens_to_ids(names)
    text = {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 128000,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "layer_types": [FULL] * 4,
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "num_heads": 16,
        "intermediate_size": 3420,
        "out_hidden_size": 2048,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    # Flat, as published: transformers 4 loses the architectures of a config with a text_config.
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "vision_config": vision,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(text | config))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    pixels = {"min_pixels": 56 * 56, "max_pixels": 12845056}
    processor = hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(),
        chat_template=template,
    )
    processor.save_pretrained(path)
