"""Attention layers of a model and their paths, also of those that are no modules of it.

vLLM's Transformers backend puts its attention layers into the classes of transformers. In 0.16 they are in a dictionary
by the number of the layer, which the attention class of transformers has too.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention


def attention_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields paths and layers. A layer of a module that a model uses at several places has several paths."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Attention | MLAAttention):
            yield path, module
        instances = getattr(module, "attention_instances", None)
        if isinstance(instances, dict):
            numbered = [(name, each) for name, each in module.named_modules() if hasattr(each, "layer_idx")]
            places = {each.layer_idx: name for name, each in numbered}
            places |= {each.layer_idx: name for name, each in numbered if "Attention" in type(each).__name__}
            for index, layer in instances.items():
                yield ".".join(filter(None, (path, places.get(index), "attn"))), layer
