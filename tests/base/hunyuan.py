"""A tiny HunYuan-VL. The results of transformers, with vLLM's order of sections, are in ``hunyuan.json``.

The release of transformers that vLLM 0.16 takes has no such model: ``.venv-newest/bin/python tests/base/hunyuan.py``
writes the file anew, by 5.20.2. Frequencies are high, so that tokens depend on each of the four positions.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

IMAGE, BEGIN, END = 120120, 120118, 120119
"""The ids that vLLM's processor of this model has, whatever its checkpoint says."""
VOCAB_SIZE, HIDDEN, HEADS, KV_HEADS, HEAD, MLP = 120130, 64, 4, 2, 16, 96
PATCH, TOWER, TOWER_MLP = 4, 32, 48
TOKEN_BYTES = 4 * 2 * 2 * KV_HEADS * HEAD
"""Bytes of KV cache a token: float32, keys and values of two layers."""
RECORDED = Path(__file__).with_suffix(".json")
PROMPTS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([5, 17, BEGIN, IMAGE, END, 42, 9], [(32, 24)]),
    ([BEGIN, IMAGE, END, 7, 8, BEGIN, IMAGE, END, 300], [(16, 16), (24, 40)]),
    ([1500, 3, 99], []),
    ([*range(40, 70), BEGIN, IMAGE, END], [(48, 16)]),
]
"""Tokens, and the width and height of each image in them."""
COUNT = 12
CONFIG: dict[str, Any] = {
    "architectures": ["HunYuanVLForConditionalGeneration"],
    "model_type": "hunyuan_vl",
    "vocab_size": VOCAB_SIZE,
    "org_vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "attention_head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "use_qk_norm": True,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_theta": 10.0,
    "rope_scaling": {"type": "xdrope", "alpha": 2.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]},
    "pad_token_id": 120002,
    "pad_id": 120002,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": IMAGE,
    "image_start_token_id": BEGIN,
    "image_end_token_id": END,
    "vision_config": {
        "model_type": "hunyuan_vl",
        "hidden_size": TOWER,
        "intermediate_size": TOWER_MLP,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "patch_size": PATCH,
        "out_hidden_size": HIDDEN,
        "text_hidden_size": HIDDEN,
        "max_image_size": 32,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
    },
    "dtype": "float32",
}
SIZES: dict[str, Any] = {
    "size": {"shortest_edge": 64, "longest_edge": 64 * 64},
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 1,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Shape of each tensor, by the names of published checkpoints."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(2):
        text, tower = f"model.layers.{layer}.", f"vit.layers.{layer}."
        found |= {
            f"{text}input_layernorm.weight": (HIDDEN,),
            f"{text}post_attention_layernorm.weight": (HIDDEN,),
            f"{text}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{text}self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{text}self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{text}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{text}self_attn.query_layernorm.weight": (HEAD,),
            f"{text}self_attn.key_layernorm.weight": (HEAD,),
            f"{text}mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{text}mlp.up_proj.weight": (MLP, HIDDEN),
            f"{text}mlp.down_proj.weight": (HIDDEN, MLP),
        }
        for name, shape in {
            "input_layernorm": (TOWER,),
            "post_attention_layernorm": (TOWER,),
            "self_attn.q_proj": (TOWER, TOWER),
            "self_attn.k_proj": (TOWER, TOWER),
            "self_attn.v_proj": (TOWER, TOWER),
            "self_attn.o_proj": (TOWER, TOWER),
            "mlp.dense_h_to_4h": (TOWER_MLP, TOWER),
            "mlp.dense_4h_to_h": (TOWER, TOWER_MLP),
        }.items():
            found |= {f"{tower}{name}.weight": shape, f"{tower}{name}.bias": shape[:1]}
    return found | {
        "vit.embeddings.patch_embedding.weight": (TOWER, 3, PATCH, PATCH),
        "vit.embeddings.patch_embedding.bias": (TOWER,),
        "vit.embeddings.position_embedding.weight": (65, TOWER),
        "vit.perceive.proj.0.weight": (2 * TOWER, TOWER, 2, 2),
        "vit.perceive.proj.0.bias": (2 * TOWER,),
        "vit.perceive.proj.2.weight": (4 * TOWER, 2 * TOWER, 1, 1),
        "vit.perceive.proj.2.bias": (4 * TOWER,),
        "vit.perceive.mlp.weight": (HIDDEN, 4 * TOWER),
        "vit.perceive.mlp.bias": (HIDDEN,),
        "vit.perceive.image_newline": (4 * TOWER,),
        "vit.perceive.image_begin": (HIDDEN,),
        "vit.perceive.image_end": (HIDDEN,),
        "vit.perceive.image_sep": (HIDDEN,),
        "vit.perceive.before_rms.weight": (TOWER,),
        "vit.perceive.after_rms.weight": (HIDDEN,),
    }


def make_hunyuan(directory: Path) -> Path:
    """Writes the checkpoint; its weights are drawn by NumPy, so that they are the same everywhere."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path, rng = directory / "hunyuan-vl", np.random.default_rng(0)
    path.mkdir(parents=True)
    tensors = {}
    for name, shape in shapes().items():
        drawn = torch.from_numpy(rng.standard_normal(shape, np.float32))
        is_norm = (len(shape) == 1 and "norm" in name and name.endswith("weight")) or "_rms" in name
        scale = 0.2 if is_norm else 0.1 if "embed_tokens" in name else (shape[-1] if len(shape) > 1 else 16) ** -0.5
        if "position_embedding" in name:
            scale = 0.0  # Between its places transformers and vLLM interpolate otherwise.
        tensors[name] = scale * drawn + float(is_norm)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    kinds: dict[str, Any] = {
        "image_processor_type": "HunYuanVLImageProcessor",
        "processor_class": "HunYuanVLProcessor",
        "min_pixels": 64,
        "max_pixels": 64 * 64,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(SIZES | kinds))
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCAB_SIZE)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    words.add_special_tokens([AddedToken(f"t{number}", special=True) for number in (IMAGE, BEGIN, END)])
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", pad_token="t120002").save_pretrained(path)
    return path


def pictures(index: int) -> list[Image.Image]:
    """Images of a prompt: blots of colour, of sizes that need no scaling."""
    made = []
    for place, (width, height) in enumerate(PROMPTS[index][1]):
        rng = np.random.default_rng([index, place])
        blots = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
        made.append(blots.resize((width, height), Image.Resampling.NEAREST))
    return made


def split_as_vllm(self: Any, freqs: torch.Tensor) -> torch.Tensor:
    """Splits a head as vLLM does: both halves have all sections in turn, so that what is rotated together has one
    position. transformers has the first two sections in one half and the last two in the other."""
    parts = [each[axis] for axis, each in enumerate(freqs.split(self.mrope_section, dim=-1))]
    return torch.cat((*parts, *parts), dim=-1)


@torch.no_grad()
def continued(path: Path) -> list[dict[str, list[int]]]:
    """Tokens of each prompt, with those that its images take up, and what transformers continues it with."""
    from transformers import HunYuanVLForConditionalGeneration, HunYuanVLImageProcessor

    model = HunYuanVLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    processor, found = HunYuanVLImageProcessor(**SIZES), []
    for index, (prompt, sizes) in enumerate(PROMPTS):
        given: dict[str, torch.Tensor] = {}
        if sizes:
            made = processor(pictures(index), return_tensors="pt")
            given = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        lengths = [(height // 8) * (width // 8 + 1) + 2 for width, height in sizes]
        ids: list[int] = []
        for token in prompt:
            ids += [IMAGE] * lengths.pop(0) if token == IMAGE else [token]
        tokens = torch.tensor([ids])
        given |= {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int()}
        out = model.generate(**given, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append({"prompt": ids, "tokens": out[0, len(ids) :].tolist()})
    return found


def record() -> None:
    """Writes what transformers makes of the prompts with vLLM's order of sections."""
    import tempfile

    from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLRotaryEmbedding

    HunYuanVLRotaryEmbedding.recomposition_frequencies = split_as_vllm
    with tempfile.TemporaryDirectory() as directory:
        RECORDED.write_text(json.dumps(continued(make_hunyuan(Path(directory)))) + "\n")


def add_processor(path: Path) -> None:
    """Writes the processor of transformers beside the checkpoint."""
    from transformers import HunYuanVLImageProcessor, HunYuanVLProcessor, PreTrainedTokenizerFast

    named = {"image_token": IMAGE, "image_start_token": BEGIN, "image_end_token": END}
    words = {name: f"t{token}" for name, token in named.items()}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, extra_special_tokens=words)
    HunYuanVLProcessor(HunYuanVLImageProcessor(**SIZES), tokenizer).save_pretrained(path)


if __name__ == "__main__":
    record()
