"""LoRA adapters with random weights, as PEFT saves them; HF transformers with an adapter merged into its weights."""

import json
import math
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.lora.request import LoRARequest

from model_runner_base.testing.models import TinyModel, reference_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYWHERE = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
EXPERTS = "experts"
"""Target that stands for all matrices of a model's experts."""


@dataclass(frozen=True)
class TinyAdapter:
    """A PEFT checkpoint on disk, and the model that it is for."""

    name: str
    number: int
    path: Path
    model: Path

    @property
    def request(self) -> LoRARequest:
        return LoRARequest(self.name, self.number, str(self.path))

    @property
    def merged(self) -> TinyModel:
        """The model with the adapter merged into its weights: the reference."""
        return _merge(self.model, self.path)


def make_adapter(
    model: Path,
    directory: Path,
    number: int,
    rank: int = 8,
    targets: Sequence[str] = ATTENTION,
    use_rslora: bool = False,
    size: float = 0.3,
    part: str = "",
    without: str = "no layer",
    **config: Any,
) -> TinyAdapter:
    """Writes an adapter with random weights, unless it is there.

    Args:
        size: standard deviation of what it adds to a layer's weights, relative to theirs.
        targets: last words of layers' names; ``EXPERTS`` for experts.
        part: text that is in the names of all layers that it adapts.
        without: text that is in the names of none of them.
        config: further settings of ``adapter_config.json``.
    """
    path = directory / f"adapter-{number}"
    adapter = TinyAdapter(path.name, number, path, model)
    if path.exists():
        return adapter
    generator = torch.Generator().manual_seed(number)
    scale = _scale(alpha := 2 * rank, rank, use_rslora)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in reference_model(model).named_modules():
        is_target = part in name and without not in name and name.rpartition(".")[2] in targets
        if not isinstance(layer, nn.Linear | nn.Embedding) or not is_target:
            continue
        is_embedding = isinstance(layer, nn.Embedding)
        num_out, num_in = layer.weight.shape[::-1] if is_embedding else layer.weight.shape
        std = size * float(layer.weight.detach().std()) / scale / math.sqrt(rank)
        for matrix, shape, factor in (("A", (rank, num_in), 1.0), ("B", (num_out, rank), std)):
            key = f"lora_embedding_{matrix}" if is_embedding else f"lora_{matrix}.weight"
            tensors[f"base_model.model.{name}.{key}"] = factor * torch.randn(shape, generator=generator)
    for name, weights in expert_weights(reference_model(model)).items() if EXPERTS in targets else ():
        if part in name and without not in name:
            num_experts, num_out, num_in = weights.shape
            std = size * float(weights.detach().std()) / scale / math.sqrt(rank)
            shapes = (rank * num_experts, num_in), (num_out, rank * num_experts)
            for matrix, shape, factor in zip("AB", shapes, (1.0, std), strict=True):
                key = f"base_model.model.{name}.lora_{matrix}.weight"
                tensors[key] = factor * torch.randn(shape, generator=generator)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "target_modules": list(targets),
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(settings | config))
    return adapter


@torch.no_grad()
def expert_weights(hf: Any) -> dict[str, torch.Tensor]:
    """Views of the weights of experts, [experts, out, in], by the names that adapters have for their matrices.

    Experts that have matrices of their own are listed each, as one expert.
    """
    found: dict[str, torch.Tensor] = {}
    for name, layer in hf.named_modules():
        if type(layer).__name__ == "GptOssExperts":  # Stored as [experts, in, out].
            found[f"{name}.base_layer"] = layer.gate_up_proj.transpose(1, 2)
            found[name] = layer.down_proj.transpose(1, 2)
        elif name.endswith(".experts") and hasattr(layer, "gate_up_proj"):
            for number, (gate_up, down) in enumerate(zip(layer.gate_up_proj, layer.down_proj, strict=True)):
                gate, up = gate_up.chunk(2)
                for last, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                    found[f"{name}.{number}.{last}"] = weight.unsqueeze(0)
        elif ".experts." in name and isinstance(layer, nn.Linear):
            found[name] = layer.weight.unsqueeze(0)
    return found


def _scale(alpha: float, rank: int, use_rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if use_rslora else rank)


@cache
@torch.no_grad()
def _merge(model: Path, adapter: Path) -> TinyModel:
    """Adds ``scale * B @ A`` to each layer's weight; a head that is tied to the embeddings gets a weight of its own."""
    hf = deepcopy(reference_model(model))
    hf.lm_head.weight = nn.Parameter(hf.lm_head.weight.clone())
    hf.config.tie_word_embeddings = False
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = _scale(config["lora_alpha"], config["r"], config["use_rslora"])
    tensors = {name: tensor.float() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    experts = expert_weights(hf)
    for key, a in tensors.items():
        name, _, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
        if kind == "A.weight" and name in experts:
            num_experts = len(experts[name])
            by_expert = a.unflatten(0, (num_experts, -1))
            b = tensors[key.replace("lora_A", "lora_B")].unflatten(1, (-1, num_experts))
            experts[name] += scale * torch.einsum("ore,eri->eoi", b, by_expert)
        elif kind == "A.weight":
            hf.get_submodule(name).weight += scale * tensors[key.replace("lora_A", "lora_B")] @ a
        elif kind == "embedding_A":
            hf.get_submodule(name).weight += scale * (tensors[key.replace("embedding_A", "embedding_B")] @ a).T
    path = adapter.parent / f"{adapter.name}-in-{model.name}"
    shutil.copytree(model, path)  # Copies the processor of a vision model, too.
    hf.save_pretrained(path)
    return TinyModel(path)
