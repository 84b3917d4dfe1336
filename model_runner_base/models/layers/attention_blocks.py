"""Attention blocks of a model: an attention layer, and the projections around it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention

from model_runner_base.models.tower_placement import towers_of


def attention_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields paths and layers. A layer of a module that a model uses at several places has several paths.

    vLLM's Transformers backend puts its attention layers into the classes of transformers. In 0.16 they are in a
    dictionary by the number of the layer, which the attention class of transformers has too.
    """
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


OTHER, TOWER = ".other", ".tower"
"""Labels of parameters that are in no block; labels of the others are paths of modules, which begin with no dot."""


@dataclass
class Block:
    """The smallest module that has an attention layer, and weights that are not the layer's own."""

    module: nn.Module
    paths: list[str] = field(default_factory=list)
    """Several where the model uses the module at several places."""
    layers: list[str] = field(default_factory=list)
    """Names of its attention layers. Each has a cache of its own."""

    def layers_at(self, path: str) -> list[str]:
        """Names of the layers that a scale of the block applies to, under one of its paths.

        A block with as many layers as paths has a layer for each path. The first path is also that of the weights, so
        its scale applies to all of them.
        """
        place = self.paths.index(path)
        return self.layers if place == 0 or len(self.paths) != len(self.layers) else [self.layers[place]]


class AttentionBlocks:
    """Blocks of a model before its weights are processed, by path and by parameter."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self.layers: dict[str, Sequence[str]] = {}
        """Names of layers by the path of their block, and by their own."""
        self.labels: dict[nn.Parameter, str] = {parameter: OTHER for parameter in model.parameters()}
        """Labels of all parameters: the first path of the block that they are in."""
        for tower in towers_of(model):
            self.labels |= dict.fromkeys(tower.parameters(), TOWER)
        blocks: dict[int, Block] = {}
        for path, layer in attention_layers(model):
            place = _path_of_block(path, layer, modules)
            block = blocks.setdefault(id(modules[place]), Block(modules[place]))
            block.paths += [place] * (place not in block.paths)
            block.layers += [layer.layer_name] * (layer.layer_name not in block.layers)
            self.layers[path] = [layer.layer_name]
        # A block may be in another one; its parameters are its own.
        for block in sorted(blocks.values(), key=lambda block: block.paths[0].count(".")):
            self.layers |= {path: block.layers_at(path) for path in block.paths}
            self.labels |= dict.fromkeys(block.module.parameters(), block.paths[0])


def _path_of_block(path: str, layer: Any, modules: dict[str, nn.Module]) -> str:
    own = {*layer.parameters()}
    path = path.rpartition(".")[0]
    while path and own.issuperset(modules[path].parameters()):
        path = path.rpartition(".")[0]
    return path
