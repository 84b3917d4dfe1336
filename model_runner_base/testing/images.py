"""Tiny vision models, with processors of their own, and pictures for them; HF transformers is the reference."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from model_runner_base.testing.architectures import EXPERTS
from model_runner_base.testing.further_images import FURTHER_FAMILIES, VIDEO_FAMILIES
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.processed import (
    TEXT,
    TOWER,
    Family,
    continued,
    hf,
    make_processed_model,
    reference,
    special_tokenizer,
)
from model_runner_base.testing.recurrent_architectures import DELTA_NET
from model_runner_base.vllm_compat.probes.multimodal import NEEDS_TIMES, WITHOUT_VIDEO

TOKEN_BYTES = PRECISION.dtype.itemsize * 2 * TEXT["num_hidden_layers"] * TEXT["num_key_value_heads"] * 16
"""Bytes of KV cache for one token, in the kit's dtype; head size 16."""


@dataclass(frozen=True)
class SeeingModel:
    """A checkpoint on disk and its reference; ``placeholder`` is the text in place of an image in a prompt."""

    path: Path
    placeholder: str

    def greedy(
        self, text: str, images: Sequence[Image.Image], count: int, **settings: Any
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens as the reference's processor makes them with these settings, and the next ``count``."""
        return continued(self.path, count, text=[text], images=list(images) or None, **settings)

    def greedy_of_video(self, text: str, frames: np.ndarray, count: int) -> tuple[list[int], list[int]]:
        """The same for a video [frames, height, width, 3] of two frames a second, none of which is skipped."""
        video = torch.from_numpy(frames).permute(0, 3, 1, 2)
        told = {"do_sample_frames": False, "video_metadata": [video_facts(frames)]} if self.takes_times else {}
        return continued(self.path, count, text=[text], videos=[video], **told)

    @property
    def limits(self) -> dict[str, Any]:
        """Engine options that rule out videos, for models whose videos the engine refuses; otherwise none."""
        architectures = json.loads((self.path / "config.json").read_text()).get("architectures") or ()
        return {"limit_mm_per_prompt": {"video": 0}} if {*architectures} & {*WITHOUT_VIDEO} else {}

    @property
    def takes_times(self) -> bool:
        """Whether its processor takes the time of each frame, which some write into the prompt."""
        text = (self.path / "config.json").read_text()
        return any(name in text for name in ("Qwen3VL", "Qwen3_5", "Glm4v", *NEEDS_TIMES))

    def log_probabilities(self, text: str, images: Sequence[Image.Image], tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [len(tokens), V] at the place of each of ``tokens``, given all tokens before it."""
        logits: torch.Tensor = self.run(text, images, tokens).logits[0]
        return logits[-len(tokens) - 1 : -1].log_softmax(-1)

    def run(self, text: str, images: Sequence[Image.Image], tokens: Sequence[int], **options: Any) -> Any:
        """Output of the reference for a prompt followed by ``tokens``; ``options`` are more arguments of the model."""
        model, processor = reference(self.path)
        inputs = processor(text=[text], images=list(images) or None, return_tensors="pt")
        ids = torch.tensor([tokens])
        zeros = torch.zeros_like(ids)
        further = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        further |= {"token_type_ids": zeros, "mm_token_type_ids": zeros}
        for name in further.keys() & inputs.keys():
            inputs[name] = torch.cat((inputs[name], further[name].to(inputs[name].dtype)), dim=1)
        with torch.no_grad():
            return model(**inputs, **options)


def video_facts(frames: np.ndarray) -> dict[str, Any]:
    """Metadata of a video of two frames a second."""
    indices = list(range(len(frames)))
    return {"total_num_frames": len(frames), "fps": 2.0, "duration": len(frames) / 2, "frames_indices": indices}


def picture(seed: int, width: int, height: int) -> Image.Image:
    """A picture of blots in random colours: small pictures of mere noise look all the same to a tower."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _llava() -> Family:
    tokenizer = special_tokenizer("<image>")
    vision = hf.CLIPVisionConfig(**(TOWER | {"num_hidden_layers": 3}), image_size=32, patch_size=8)
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=hf.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    return config, processor, "<image>"


_VISION = {"depth": 3, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_PIXELS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 16 * 16, "max_pixels": 64 * 64}


def _qwen_vl(classes: tuple[Any, Any, Any], vision: dict[str, Any], **text: Any) -> Family:
    """A model of the Qwen-VL kind; ``classes`` are those of config, processor and video processor."""
    config_class, processor_class, video_class = classes
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = special_tokenizer(*names)
    start, end, image, video = tokenizer.convert_tokens_to_ids(names)
    config = config_class(
        vision_config=_VISION | vision,
        text_config=TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}} | text,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    sizes = {"size": {"shortest_edge": _PIXELS["min_pixels"], "longest_edge": _PIXELS["max_pixels"]}}
    processor = processor_class(
        image_processor=hf.Qwen2VLImageProcessor(**_PIXELS),
        tokenizer=tokenizer,
        video_processor=video_class(**_PIXELS, **sizes),
    )
    return config, processor, "".join((names[0], names[2], names[1]))


def _qwen2_vl() -> Family:
    classes = hf.Qwen2VLConfig, hf.Qwen2VLProcessor, hf.Qwen2VLVideoProcessor
    return _qwen_vl(classes, {"embed_dim": 32, "hidden_size": TEXT["hidden_size"]})


_INNER = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": TEXT["hidden_size"]}


def _qwen2_5_vl() -> Family:
    classes = hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLProcessor, hf.Qwen2VLVideoProcessor
    return _qwen_vl(classes, _INNER | {"window_size": 16, "fullatt_block_indexes": [1]})


def _qwen3_vl(config_class: Any = hf.Qwen3VLConfig, **text: Any) -> Family:
    classes = config_class, hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor
    rotation = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = _INNER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return _qwen_vl(classes, vision, head_dim=16, rope_scaling=rotation, **text)


def _qwen3_vl_moe() -> Family:
    # transformers 5 has no norm_topk_prob, which published checkpoints have and vLLM reads.
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    return _qwen3_vl(hf.Qwen3VLMoeConfig, **experts)


def _qwen3_5(config_class: str = "Qwen3_5Config", **text: Any) -> Family:
    classes = getattr(hf, config_class), hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor
    rotation = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    layers = DELTA_NET | {"num_hidden_layers": 2, "rope_scaling": rotation}
    return _qwen_vl(classes, _INNER | {"num_position_embeddings": 64}, **layers, **text)


def _qwen3_5_moe() -> Family:
    return _qwen3_5("Qwen3_5MoeConfig", **EXPERTS, shared_expert_intermediate_size=32)


def _llava_onevision() -> Family:
    tokenizer = special_tokenizer("<image>", "<video>")
    pinpoints = [[32, 32], [32, 64], [64, 32], [64, 64]]
    vision = hf.SiglipVisionConfig(**TOWER, image_size=32, patch_size=8)
    config = hf.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=hf.Qwen2Config(**TEXT, architectures=["Qwen2ForCausalLM"]),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_4",
        tie_word_embeddings=False,
    )
    size = {"height": 32, "width": 32}
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints),
        tokenizer=tokenizer,
        video_processor=hf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
    )
    return config, processor, "<image>"


def _mistral3() -> Family:
    names = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer = special_tokenizer(*names)
    vision = hf.PixtralVisionConfig(**TOWER, image_size=64, patch_size=8)
    config = hf.Mistral3Config(
        vision_config=vision,
        text_config=hf.MistralConfig(**TEXT, head_dim=16, sliding_window=None, architectures=["MistralForCausalLM"]),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    images = hf.PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
    processor = hf.PixtralProcessor(image_processor=images, tokenizer=tokenizer, patch_size=8, spatial_merge_size=2)
    return config, processor, "[IMG]"


def _internvl() -> Family:
    names = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    named = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    tokenizer = special_tokenizer(*names, **dict(zip(named, names, strict=True)))
    config = hf.InternVLConfig(
        vision_config=hf.InternVLVisionConfig(**TOWER, image_size=[32, 32], patch_size=[8, 8]),
        text_config=hf.Qwen2Config(**TEXT, architectures=["Qwen2ForCausalLM"]),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    size = {"height": 32, "width": 32}
    processor = hf.InternVLProcessor(
        image_processor=hf.GotOcr2ImageProcessorFast(size=size, max_patches=4, crop_to_patches=True),
        tokenizer=tokenizer,
        video_processor=hf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
    )
    return config, processor, "<IMG_CONTEXT>"


def _gemma3() -> Family:
    """Gemma 3, with images of 16 tokens, which see each other, and layers with a window of 24."""
    names = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    # vLLM's processor asks for these by name.
    newlines = ["\n" * count for count in range(1, 5)]
    named = dict(zip(("boi_token", "image_token", "eoi_token"), names, strict=True))
    tokenizer = special_tokenizer(*names, *newlines, **named)
    ids = tokenizer.convert_tokens_to_ids(names)
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**TOWER, image_size=32, patch_size=4, vision_use_head=False),
        text_config=hf.Gemma3TextConfig(
            **TEXT | {"num_hidden_layers": 3},
            head_dim=16,
            sliding_window=24,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        mm_tokens_per_image=16,
        boi_token_index=ids[0],
        image_token_index=ids[1],
        eoi_token_index=ids[2],
        # transformers 5 reads it here: tied weights of this size repeat a prompt's last token.
        tie_word_embeddings=False,
    )
    images = hf.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    processor = hf.Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=16)
    return config, processor, "<start_of_image>"


FAMILIES = {
    "llava": _llava,
    "qwen2-vl": _qwen2_vl,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
    "llava-onevision": _llava_onevision,
    "mistral3": _mistral3,
    "internvl": _internvl,
    "gemma3": _gemma3,
    "qwen3-vl-moe": _qwen3_vl_moe,
    **FURTHER_FAMILIES,
    **({"qwen3.5": _qwen3_5, "qwen3.5-moe": _qwen3_5_moe} if hasattr(hf, "Qwen3_5Config") else {}),
}


def make_seeing_model(name: str, directory: Path) -> SeeingModel:
    """Writes a tiny checkpoint of a family with its processor."""
    return SeeingModel(*make_processed_model(name, directory, (FAMILIES | VIDEO_FAMILIES)[name]))
