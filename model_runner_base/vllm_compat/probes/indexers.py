"""vLLM's indexers (sparse attention, DSA), and settings of theirs that vLLM reads otherwise than published code."""

import sys
from collections.abc import Iterator
from inspect import signature
from typing import Any

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

SHARES_CHOICES = "skip_topk" in signature(MultiHeadLatentAttentionWrapper.__init__).parameters
"""Whether vLLM's layers may take the choice of an earlier layer."""
ROTATES_LAST = {"vllm.model_executor.models.deepseek_v2": False, "vllm.models.hy_v4.nvidia.attention": True}
"""Modules of vLLM with a class ``Indexer``, of which a release may lack some; and whether it rotates the last numbers
of queries and keys, not the first."""
BY_TYPES = ("HYV4ForCausalLM",)
"""Architectures of which vLLM reads ``indexer_types``."""
INTERLEAVED = {"DeepseekV32ForCausalLM": False, "GlmMoeDsaForCausalLM": True}
"""Whether an architecture's indexers rotate neighbouring numbers, rather than halves, in published code."""


def indexers(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Yields a model's indexers, with their names, and whether each rotates the last numbers of queries and keys."""
    # A model that has an indexer has imported its module.
    kinds = [(sys.modules[name].Indexer, is_last) for name, is_last in ROTATES_LAST.items() if name in sys.modules]
    for name, module in model.named_modules():
        for kind, is_last in kinds:
            if isinstance(module, kind):
                yield name, module, is_last


def misread_rotation(config: Any, architecture: str) -> bool | None:
    """Value of ``indexer_rope_interleave`` with which vLLM runs a model of ``architecture``, or its own draft, as
    published; None if the config has it."""
    right = INTERLEAVED.get(architecture)
    return None if getattr(config, "indexer_rope_interleave", False) in (right, None) else right


def draft_with_indexer(vllm_config: VllmConfig) -> ModelConfig | None:
    """Config of the model's own layers that draft (``mtp``), each with an indexer of its own; None without them.

    vLLM reads it from the checkpoint once more, and passes over fields of ``hf_overrides``.
    """
    drafts = vllm_config.speculative_config
    return drafts.draft_model_config if drafts is not None and drafts.method == "mtp" else None


def misread_sharing(config: Any, architecture: str) -> str | None:
    """Reason why layers would take another layer's choice than in published code; None if they would not."""
    kinds = getattr(config, "indexer_types", None)
    of_kinds = None if kinds is None else [kind == "shared" for kind in kinds]
    shared = of_kinds if of_kinds and architecture in BY_TYPES else _shared_by_vllm(config)
    if any(shared) and not SHARES_CHOICES:
        return "layers that share an indexer's choice (index_topk_freq, index_topk_pattern) need vLLM 0.33"
    if shared and shared[0]:
        return "the first layer has no earlier layer whose choice it could share (index_topk_pattern, indexer_types)"
    if of_kinds is not None and of_kinds[: len(shared)] != shared:
        return (
            "vLLM reads which layers share an indexer's choice from index_topk_freq, index_topk_pattern and "
            "index_skip_topk_offset, and indexer_types says otherwise"
        )
    return None


def _shared_by_vllm(config: Any) -> list[bool]:
    """Whether each layer has no indexer of its own, by vLLM's rule."""
    layers, pattern = range(getattr(config, "num_hidden_layers", 0)), getattr(config, "index_topk_pattern", None)
    if pattern is not None:
        return [layer < len(pattern) and pattern[layer] == "S" for layer in layers]
    frequency = getattr(config, "index_topk_freq", None) or 1
    offset = getattr(config, "index_skip_topk_offset", 2)
    return [max(layer - offset + 1, 0) % frequency != 0 for layer in layers]
