"""Towers that see tiles of one size: which models have one, and how an item's rows follow from its tiles.

A tile becomes as many rows as any other, whatever stands beside it. So a graph by number of tiles serves images of all
sizes, and what depends on the size of an image is which rows are kept, and in which order: numbers, worked out on the
host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import ModelConfig
from vllm.model_executor.models.vision import get_num_selected_vision_tokens, get_vision_encoder_info

BETWEEN = -1
"""In place of a row: the model's embedding between the rows of an image."""

Contents = Mapping[str, Any]
"""An item as the processor made it: tensors by name."""


def _in_order(model: Any, contents: Contents, num_tiles: int, num_rows: int) -> np.ndarray:
    return np.arange(num_tiles * num_rows)


def _around_newlines(model: Any, contents: Contents, num_tiles: int, num_rows: int) -> np.ndarray:
    """vLLM's own way from tiles to an image, walked by the numbers of the rows."""
    numbers = torch.arange(num_tiles * num_rows).view(num_tiles, num_rows, 1)
    itself = SimpleNamespace(config=model.config, image_newline=torch.tensor([BETWEEN]))
    size = contents["image_sizes"].flatten()
    return type(model)._merge_image_patch_embeddings(itself, size, numbers, strategy="spatial_unpad").flatten().numpy()


@dataclass(frozen=True)
class TiledTower:
    """What a model does with an image, in three parts."""

    encode: Callable[[Any, torch.Tensor], torch.Tensor]
    """The rows [N, ..., hidden] that the model makes of tiles [N, channels, height, width]. Traceable."""
    num_rows: Callable[[Any], int]
    """How many rows the model makes of a tile."""
    order: Callable[[Any, Contents, int, int], np.ndarray] = _in_order
    """[N] which of its tiles' rows each row of an item is, or ``BETWEEN``: of a model, an item's contents, the number
    of its tiles and of a tile's rows. None stands twice."""
    pixels: Sequence[str] = ("pixel_values",)
    """What tiles are called in an item's contents, in one kind of item each."""
    towers: Sequence[str] = ()
    """Kinds of vision config; none given: any."""

    def tiles_of(self, contents: Contents, shape: Sequence[int]) -> torch.Tensor | None:
        """[N, channels, height, width]; None if the item is something else, such as embeddings that the user made.

        Raises RuntimeError for tiles of another ``shape``, which the model does not see.
        """
        given = [contents[name] for name in self.pixels if name in contents]
        if given and given[0].shape[-3:] != tuple(shape):
            raise RuntimeError(f"tiles have the shape {[*given[0].shape[-3:]]}, but the tower takes {[*shape]}")
        return given[0].reshape(-1, *shape) if given else None


def _by_projector(model: Any, tiles: torch.Tensor) -> torch.Tensor:
    return model.multi_modal_projector(model._image_pixels_to_features(model.vision_tower, tiles))


def _selected_rows(model: Any) -> int:
    info = get_vision_encoder_info(model.config)
    side = info.get_image_size()
    count = info.get_num_image_tokens(image_width=side, image_height=side)
    return get_num_selected_vision_tokens(count, model.config.vision_feature_select_strategy)


def _shuffled_rows(model: Any) -> int:
    vision = model.config.vision_config
    return int((vision.image_size // vision.patch_size // model.config.downsample_factor) ** 2)


TILED_TOWERS = {
    "LlavaForConditionalGeneration": TiledTower(_by_projector, _selected_rows, towers=("clip_vision_model",)),
    "LlavaNextForConditionalGeneration": TiledTower(
        _by_projector, _selected_rows, _around_newlines, towers=("clip_vision_model",)
    ),
    "Gemma3ForConditionalGeneration": TiledTower(_by_projector, lambda model: int(model.config.mm_tokens_per_image)),
    "InternVLForConditionalGeneration": TiledTower(
        lambda model, tiles: model.extract_feature(tiles),
        lambda model: int(model.num_image_token),
        pixels=("pixel_values", "pixel_values_videos"),
    ),
    "Cohere2VisionForConditionalGeneration": TiledTower(
        lambda model, tiles: model.multi_modal_projector(model.vision_tower(tiles)), _shuffled_rows
    ),
}
"""By architecture. Of every other model, towers run eagerly."""


def tiled_tower(model_config: ModelConfig) -> TiledTower | None:
    """Of a model that has one."""
    tower = TILED_TOWERS.get(model_config.architecture) if model_config.is_multimodal_model else None
    if tower is None or (tower.towers and model_config.hf_config.vision_config.model_type not in tower.towers):
        return None
    return tower


def tile_shape(vision_config: Any) -> tuple[int, int, int]:
    """Channels, height, width."""
    side = vision_config.image_size
    height, width = (side, side) if isinstance(side, int) else side
    return int(vision_config.num_channels), int(height), int(width)
