"""Loads the draft model, and gives it the target's layers that its checkpoint leaves out."""

from typing import Any

from torch import nn
from vllm.config import VllmConfig, replace

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.weight_stream import get_model
from model_runner_base.vllm_compat.types.speculation import HOST_METHODS, read_speculation

ATTRIBUTE = "draft_model"
"""Attribute of the target that holds the draft, so that a device moves or re-lays the weights of both together."""


NUM_LAYERS_READ = 3
"""Number of the target's layers whose states EAGLE-3 reads."""


def load_draft(vllm_config: VllmConfig, target: nn.Module) -> None:
    """Loads the draft model that ``speculative_config`` names, if any, and makes it a part of the target.

    Raises UnsupportedConfigError if the two do not fit together.
    """
    method, config = read_speculation(vllm_config).method, vllm_config.speculative_config
    draft: Any
    if config is None or method in HOST_METHODS:
        return
    # This import takes three CPU seconds (all of Inductor on some releases), so engines without a draft model skip it.
    from vllm.compilation.backends import set_model_tag

    if method == "draft_model":
        with set_model_tag(ATTRIBUTE):
            draft = get_model(_config_of_draft(vllm_config), prefix=ATTRIBUTE)
    else:
        with set_model_tag("eagle_head"):
            draft = get_model(vllm_config, config.draft_model_config)
        if method != "medusa":
            text = text_of(target)
            share_embeddings(draft, text)
            share_logits_head(draft, text)
    if method == "eagle3" and draft.model.use_aux_hidden_state:
        return_states_of_layers(target, config.draft_model_config.hf_config)
    setattr(target, ATTRIBUTE, draft)


def _config_of_draft(vllm_config: VllmConfig) -> VllmConfig:
    """Config of an engine that runs the draft as its model, on this rank; the draft has a quantisation of its own."""
    config = vllm_config.speculative_config
    assert config is not None
    return replace(
        vllm_config,
        model_config=config.draft_model_config,
        parallel_config=replace(config.draft_parallel_config, rank=vllm_config.parallel_config.rank),
        quant_config=None,
    )


def text_of(target: Any) -> Any:
    """The text model that reads the outputs of a target's towers; the target itself if it has none."""
    return target.get_language_model() if getattr(target, "supports_multimodal", False) else target


def draft_of(target: Any) -> Any:
    """The draft model of a target; None if it has none."""
    return getattr(target, ATTRIBUTE, None)


def share_embeddings(draft: Any, target: Any) -> None:
    """Makes a head whose checkpoint has no token embeddings use the target's.

    vLLM's classes of heads say by ``has_own_embed_tokens`` whether the checkpoint has them. Those of multi-token
    prediction lack the attribute and always share (``vllm/v1/spec_decode/eagle.py``). Raises UnsupportedConfigError if
    the target has no embeddings to share.
    """
    if not getattr(draft, "has_own_embed_tokens", False):
        inner = getattr(target, "model", target)
        names = [name for name in ("embed_tokens", "embedding") if hasattr(inner, name)]
        if not names:
            raise UnsupportedConfigError(
                f"the draft has no token embeddings of its own, and {type(target).__name__} has none where heads look "
                "for them: use a draft checkpoint with embed_tokens"
            )
        draft.model.embed_tokens = getattr(inner, names[0])


def share_logits_head(draft: Any, target: Any) -> None:
    """Makes a head whose checkpoint has no ``lm_head`` compute logits with the target's.

    Raises UnsupportedConfigError if the target has none.
    """
    if not getattr(draft, "has_own_lm_head", False):
        if not hasattr(target, "lm_head"):
            raise UnsupportedConfigError(
                f"the draft has no lm_head of its own, and {type(target).__name__} has none where heads look for it: "
                "use a draft checkpoint with lm_head"
            )
        draft.lm_head = target.lm_head
        # Each layer of multi-token prediction may have an lm_head of its own.
        layers: Any = getattr(draft.model, "layers", None) or ()
        each: Any
        for each in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
            if hasattr(each, "shared_head"):
                each.shared_head.head = target.lm_head


def return_states_of_layers(target: Any, draft_config: Any) -> None:
    """Makes the target return the hidden states that EAGLE-3 reads, at the layers that the draft's config names.

    Raises UnsupportedConfigError if the target cannot, or if the layers are wrong.
    """
    if not getattr(target, "supports_eagle3", False):
        raise UnsupportedConfigError(f"{type(target).__name__} returns no states of its layers, which EAGLE-3 reads")
    layers = getattr(draft_config, "eagle_aux_hidden_state_layer_ids", None)
    layers = tuple(layers or target.get_eagle3_aux_hidden_state_layers())
    num_layers = text_of(target).config.num_hidden_layers
    if len(set(layers)) < NUM_LAYERS_READ or min(layers) < 1 or max(layers) >= num_layers:
        raise UnsupportedConfigError(
            f"EAGLE-3 would read the states before layers {list(layers)}: they must be {NUM_LAYERS_READ} different "
            f"layers of the target's {num_layers}, none the first; set eagle_aux_hidden_state_layer_ids in the draft's "
            "config.json"
        )
    target.set_aux_hidden_state_layers(layers)
