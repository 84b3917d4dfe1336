"""More families of vision models, most with towers of CLIP's or SigLIP's kind and images cut into tiles."""

from collections.abc import Callable
from typing import Any

from model_runner_base.testing.architectures import CHUNK, GEMMA4
from model_runner_base.testing.processed import TEXT, TOWER, Family, hf, special_tokenizer


def _llava_next() -> Family:
    tokenizer = special_tokenizer("<image>")
    pinpoints = [[32, 64], [64, 32], [64, 64]]
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**(TOWER | {"num_hidden_layers": 3}), image_size=32, patch_size=8),
        text_config=hf.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        image_seq_length=16,
    )
    images = hf.LlavaNextImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=pinpoints
    )
    told = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = hf.LlavaNextProcessor(images, tokenizer, patch_size=8, image_token="<image>", **told)
    return config, processor, "<image>"


def _pixtral() -> Family:
    names = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer = special_tokenizer(*names)
    config = hf.LlavaConfig(
        vision_config=hf.PixtralVisionConfig(**TOWER, image_size=64, patch_size=8),
        text_config=hf.MistralConfig(**TEXT, head_dim=16, sliding_window=None, architectures=["MistralForCausalLM"]),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=1,
    )
    images = hf.PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    return config, hf.PixtralProcessor(images, tokenizer, patch_size=8), "[IMG]"


def _idefics3() -> Family:
    names = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    names += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer = special_tokenizer(*names)
    config = hf.Idefics3Config(
        vision_config={**TOWER, "image_size": 32, "patch_size": 8},
        text_config=TEXT | {"model_type": "llama"},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=None,
    )
    images = hf.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return config, hf.Idefics3Processor(images, tokenizer, image_seq_len=4), "<image>"


def _cohere2_vision() -> Family:
    named = {
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "image_token": "<|IMG_PATCH|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    tokenizer = special_tokenizer(*named.values(), **named)
    config = hf.Cohere2VisionConfig(
        vision_config=hf.SiglipVisionConfig(**TOWER, image_size=32, patch_size=8, vision_use_head=False),
        text_config=hf.Cohere2Config(
            **(TEXT | {"tie_word_embeddings": True}),
            sliding_window=40,
            logit_scale=1.0,
            architectures=["Cohere2ForCausalLM"],
        ),
        image_token_id=tokenizer.image_token_id,
        alignment_intermediate_size=48,
        tie_word_embeddings=True,
    )
    images = hf.Cohere2VisionImageProcessorFast(size={"height": 32, "width": 32}, patch_size=2, max_patches=4)
    return config, hf.Cohere2VisionProcessor(images, tokenizer), named["image_token"]


def glm(config_class: Any, text: dict[str, Any]) -> Family:
    names = ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"]
    names += ["<|begin_of_video|>", "<|end_of_video|>"]
    told = ["image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id"]
    told += ["video_start_token_id", "video_end_token_id"]
    tokenizer = special_tokenizer(*names)
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "image_size": 32, "patch_size": 4, "intermediate_size": 48}
    rotation = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    config = config_class(
        vision_config=vision | {"out_hidden_size": TEXT["hidden_size"]},
        text_config=TEXT
        | {"rope_scaling": rotation, "partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 16}
        | text,
        tie_word_embeddings=False,
        **dict(zip(told, tokenizer.convert_tokens_to_ids(names), strict=True)),
    )
    sizes = {"size": {"shortest_edge": 16 * 16, "longest_edge": 2 * 64 * 64}, "patch_size": 4}
    videos = hf.Glm4vVideoProcessor(**sizes, num_frames=4)
    return config, hf.Glm4vProcessor(hf.Glm4vImageProcessor(**sizes), tokenizer, videos), names[2] + names[0] + names[3]


def _glm4v() -> Family:
    return glm(hf.Glm4vConfig, {})


def _glm4v_moe() -> Family:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    return glm(hf.Glm4vMoeConfig, experts | {"first_k_dense_replace": 1, "use_qk_norm": False})


def _llama4() -> Family:
    names = ["<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>"]
    tokenizer = special_tokenizer(*names, "<|tile_y_separator|>")
    vision = TOWER | {"intermediate_size": 128, "vision_output_dim": 48, "image_size": 32, "patch_size": 8}
    config = hf.Llama4Config(
        vision_config=vision | {"projector_input_dim": 48, "projector_output_dim": 48},
        text_config=TEXT
        | {
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": CHUNK,
            "use_qk_norm": True,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
    )
    images = hf.Llama4ImageProcessorFast(size={"height": 32, "width": 32}, max_patches=4)
    return config, hf.Llama4Processor(images, tokenizer, patch_size=8), "<|image|>"


def gemma4(**text: Any) -> Family:
    """Gemma 4 with images, video and sounds; ``text`` changes its text model."""
    named = {f"{kind}_token": f"<|{kind}|>" for kind in ("boi", "image", "eoi", "boa", "audio", "eoa")}
    tokenizer = special_tokenizer(*named.values(), "<|video|>", **named)
    every = named | {"video_token": "<|video|>"}
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in every.items()}
    vision = TOWER | {"num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
    sound = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 48}
    config = hf.Gemma4Config(
        vision_config=hf.Gemma4VisionConfig(**vision, position_embedding_size=64, default_output_length=70),
        audio_config=hf.Gemma4AudioConfig(**sound, subsampling_conv_channels=[128, 4]),
        text_config=hf.Gemma4TextConfig(**GEMMA4 | {"vocab_size": TEXT["vocab_size"], "pad_token_id": 0} | text),
        tie_word_embeddings=False,
        eoa_token_index=ids["eoa_token_id"],
        **ids,
    )
    pixels = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    processor = hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(),
        hf.Gemma4ImageProcessor(**pixels),
        tokenizer,
        hf.Gemma4VideoProcessor(**pixels),
    )
    return config, processor, named["image_token"]


def _gemma4() -> Family:
    """Gemma 4 of the smaller sizes: a further embedding of each token for each layer, caches shared by layers."""
    further = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": TEXT["vocab_size"]}
    return gemma4(**further, num_kv_shared_layers=2)


FURTHER_FAMILIES: dict[str, Callable[[], Family]] = {
    "llava-next": _llava_next,
    "pixtral": _pixtral,
    "idefics3": _idefics3,
    "cohere2-vision": _cohere2_vision,
    "glm4v": _glm4v,
    "glm4v-moe": _glm4v_moe,
    "llama4": _llama4,
    **({"gemma4": _gemma4} if hasattr(hf, "Gemma4Config") else {}),
}


def _llava_next_video() -> Family:
    tokenizer = special_tokenizer("<image>", "<video>")
    pinpoints = [[32, 64], [64, 32], [64, 64]]
    config = hf.LlavaNextVideoConfig(
        vision_config=hf.CLIPVisionConfig(**(TOWER | {"num_hidden_layers": 3}), image_size=32, patch_size=4),
        text_config=hf.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]),
        image_grid_pinpoints=pinpoints,
        image_seq_length=64,
        spatial_pool_stride=2,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = hf.LlavaNextVideoProcessor(
        video_processor=hf.LlavaNextVideoVideoProcessor(**sizes),
        image_processor=hf.LlavaNextImageProcessor(**sizes, image_grid_pinpoints=pinpoints),
        tokenizer=tokenizer,
        patch_size=4,
        image_token="<image>",
        video_token="<video>",
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor, "<video>"


VIDEO_FAMILIES: dict[str, Callable[[], Family]] = {"llava-next-video": _llava_next_video}
"""Families that see videos, and no images."""
