"""Towers that see tiles of one size: which models have one, and how an item's embeddings follow from its tiles.

Each tile becomes the same number of embeddings, whatever its neighbours are. So one graph for each number of tiles
serves images of all sizes. Only the choice and the order of the embeddings depend on the size of an image, and the host
works them out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import ModelConfig
from vllm.model_executor.models.vision import get_num_selected_vision_tokens, get_vision_encoder_info

from model_runner_base.vllm_compat.probes.multimodal import takes_items

BETWEEN = -1
"""Place of the model's embedding between the lines of an image, which no tile becomes."""

Contents = Mapping[str, Any]
"""An item's tensors by name, as the processor made them."""


def _in_order(model: Any, contents: Contents, num_tiles: int, num_embeds: int) -> np.ndarray:
    return np.arange(num_tiles * num_embeds)


def _around_newlines(model: Any, contents: Contents, num_tiles: int, num_embeds: int) -> np.ndarray:
    """Orders embeddings by vLLM's own function, which gets their numbers in place of them."""
    numbers = torch.arange(num_tiles * num_embeds).view(num_tiles, num_embeds, 1)
    itself = SimpleNamespace(config=model.config, image_newline=torch.tensor([BETWEEN]))
    size = contents["image_sizes"].flatten()
    return type(model)._merge_image_patch_embeddings(itself, size, numbers, strategy="spatial_unpad").flatten().numpy()


@dataclass(frozen=True)
class TiledTower:
    """Functions of a model's tower: encoding of tiles, number of embeddings, and their order."""

    encode: Callable[[Any, torch.Tensor], torch.Tensor]
    """Encodes tiles [N, channels, height, width] to embeddings [N, ..., hidden]. Traceable."""
    num_embeds: Callable[[Any], int]
    """Number of embeddings that the model makes of a tile."""
    order: Callable[[Any, Contents, int, int], np.ndarray] = _in_order
    """Finds, for each embedding of an item, which of its tiles' it is, or ``BETWEEN``: [N], none twice.

    Takes the model, the item's contents, the number of its tiles, and the number of a tile's embeddings.
    """
    pixels: Sequence[str] = ("pixel_values",)
    """Names of the tiles in an item's contents, one for each kind of item."""
    towers: Sequence[str] = ()
    """Kinds of vision config that are supported; empty: any."""

    def tiles_of(self, contents: Contents, shape: Sequence[int]) -> torch.Tensor | None:
        """Tiles [N, channels, height, width]; None if the item has none, such as embeddings made by the user.

        Raises RuntimeError for tiles of another ``shape`` than the tower's.
        """
        given = [contents[name] for name in self.pixels if name in contents]
        if given and given[0].shape[-3:] != tuple(shape):
            raise RuntimeError(f"tiles have the shape {[*given[0].shape[-3:]]}, but the tower takes {[*shape]}")
        return given[0].reshape(-1, *shape) if given else None


def _by_projector(model: Any, tiles: torch.Tensor) -> torch.Tensor:
    return model.multi_modal_projector(model._image_pixels_to_features(model.vision_tower, tiles))


def _num_selected(model: Any) -> int:
    info = get_vision_encoder_info(model.config)
    side = info.get_image_size()
    count = info.get_num_image_tokens(image_width=side, image_height=side)
    return get_num_selected_vision_tokens(count, model.config.vision_feature_select_strategy)


def _num_shuffled(model: Any) -> int:
    vision = model.config.vision_config
    return int((vision.image_size // vision.patch_size // model.config.downsample_factor) ** 2)


TILED_TOWERS = {
    "LlavaForConditionalGeneration": TiledTower(_by_projector, _num_selected, towers=("clip_vision_model",)),
    "LlavaNextForConditionalGeneration": TiledTower(
        _by_projector, _num_selected, _around_newlines, towers=("clip_vision_model",)
    ),
    "Gemma3ForConditionalGeneration": TiledTower(_by_projector, lambda model: int(model.config.mm_tokens_per_image)),
    "InternVLForConditionalGeneration": TiledTower(
        lambda model, tiles: model.extract_feature(tiles),
        lambda model: int(model.num_image_token),
        pixels=("pixel_values", "pixel_values_videos"),
    ),
    "Cohere2VisionForConditionalGeneration": TiledTower(
        lambda model, tiles: model.multi_modal_projector(model.vision_tower(tiles)), _num_shuffled
    ),
}
"""Towers with tiles, by architecture. Towers of all other models that see tiles run eagerly."""


def tiled_tower(model_config: ModelConfig) -> TiledTower | None:
    """The tiled tower of a model; None if it has none."""
    tower = TILED_TOWERS.get(model_config.architecture) if takes_items(model_config) else None
    if tower is None or (tower.towers and model_config.hf_config.vision_config.model_type not in tower.towers):
        return None
    return tower


def tile_shape(vision_config: Any) -> tuple[int, int, int]:
    """Channels, height and width of a tile."""
    side = vision_config.image_size
    height, width = (side, side) if isinstance(side, int) else side
    return int(vision_config.num_channels), int(height), int(width)
