"""Towers of tiles as graphs on the device: one graph for each number of tiles; its rows stay in the pool.

A step's tiles run in several launches, each with the largest of a few numbers that is not more than the tiles left: 6
run as 4, 1 and 1. So there is no padding, and nothing is compiled for the size of an image.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec

from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.multimodal.towers.encoder_graphs import EncoderGraphs, check_rows
from model_runner_base.inputs.multimodal.towers.tiles import BETWEEN, TiledTower, tile_shape
from model_runner_base.inputs.pool import EmbeddingPool, EncoderRows
from model_runner_base.models.tower_placement import towers_of
from model_runner_base.step.graph_policy import WrapFunction

TILES = (16, 4, 1)
"""Numbers of tiles in one graph."""
MOST_PATCHES = 4096
"""Largest number of patches in a graph of several tiles. With more, the time for a tile would hardly be shorter, and
attention scores of each tile's patches need memory. A graph of one tile may have more."""


class TileGraphs(EncoderGraphs):
    """Encodes tiles, with a graph for each number in ``TILES`` that a step may need."""

    def __init__(
        self,
        tower: TiledTower,
        model: Any,
        pool: EmbeddingPool,
        rows: EncoderRows,
        wrap: WrapFunction,
        device_ops: DeviceOps,
    ) -> None:
        self._tower = tower
        self._model = model
        self._pool = pool
        self._rows = rows
        self._device_ops = device_ops
        self._vision = model.config.vision_config
        self._shape = tile_shape(self._vision)
        self._shaped = torch.nn.Unflatten(1, self._shape)
        """Gives tiles their shape; a module, whose numbers are constants of a graph."""
        self._rows_per_tile = tower.num_rows(model)
        most = min(pool.num_rows // self._rows_per_tile, MOST_PATCHES // self._num_patches)
        self._counts = [count for count in TILES if count <= most] or [1]
        for module in towers_of(model):
            device_ops.place(module)
        self._run = wrap(self._encode_tiles, pool.tensors)

    def _encode_tiles(self, pool: torch.Tensor, tiles: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Encodes ``tiles`` [N, pixels] and writes the rows to ``places`` [N * rows of a tile] of the pool."""
        encoded = self._tower.encode(self._model, self._shaped(tiles))
        pool.index_put_((places,), encoded.reshape(len(places), -1).to(pool.dtype))
        return places.clone()

    def encode(self, items: Sequence[MultiModalFeatureSpec]) -> Sequence[MultiModalFeatureSpec]:
        left = list[MultiModalFeatureSpec]()
        all_tiles, all_places = list[torch.Tensor](), list[np.ndarray]()
        for item in items:
            assert item.data is not None
            contents = item.data.get_data()
            tiles = self._tower.tiles_of(contents, self._shape)
            if tiles is None:
                left.append(item)
                continue
            order = self._tower.order(self._model, contents, len(tiles), self._rows_per_tile)
            check_rows(item, len(order))
            rows = self._rows.take(item.identifier, len(order))
            # Some processors pad the images of one prompt to the same number of tiles.
            tiles = tiles[: order.max() // self._rows_per_tile + 1]
            places = np.full(len(tiles) * self._rows_per_tile, self._pool.num_rows, np.int32)
            places[order[order != BETWEEN]] = rows[order != BETWEEN]
            all_tiles.append(tiles.flatten(1))
            all_places.append(places)
            self._write_between(rows[order == BETWEEN])
        if all_tiles:
            self._launch(torch.cat(all_tiles), np.concatenate(all_places))
        return left

    def _write_between(self, rows: np.ndarray) -> None:
        if len(rows):
            self._pool.write(rows, self._model.image_newline.detach().expand(len(rows), -1))

    def _launch(self, tiles: torch.Tensor, places: np.ndarray) -> None:
        tiles, begin = tiles.to(self._pool.tensors[0].dtype), 0
        while begin < len(tiles):
            count = next(count for count in self._counts if count <= len(tiles) - begin)
            to = places[begin * self._rows_per_tile : (begin + count) * self._rows_per_tile]
            of = self._device_ops.upload(tiles[begin : begin + count].clone())
            self._run(self._pool.tensors[0], of, self._device_ops.to_device(to))
            begin += count

    def warm_up(self) -> None:
        for count in self._counts:
            nowhere = np.full(count * self._rows_per_tile, self._pool.num_rows, np.int32)
            self._launch(torch.zeros((count, int(np.prod(self._shape)))), nowhere)

    @property
    def _num_patches(self) -> int:
        """Number of patches in a tile."""
        patch, (_, height, width) = self._vision.patch_size, self._shape
        across, down = (patch, patch) if isinstance(patch, int) else patch
        return 1 + (height // across) * (width // down)

    def step_memory(self) -> int:
        """Bytes in float32 of the pixels, twice, and of one layer's hidden states, activations and attention scores."""
        vision, patches, (channels, height, width) = self._vision, self._num_patches, self._shape
        layer = patches * (6 * vision.hidden_size + 2 * vision.intermediate_size)
        scores = 2 * vision.num_attention_heads * patches**2
        return 4 * self._counts[0] * (2 * channels * height * width + layer + scores)
