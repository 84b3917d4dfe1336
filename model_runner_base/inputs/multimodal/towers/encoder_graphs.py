"""Encoders as graphs, on devices that run them so (``DeviceOps.towers_as_graphs``); their outputs stay in the pool.

``PatchGraphs`` has one graph for each number of patches. No patch sees another frame. So an item runs frame by frame,
as many frames at a time as the largest graph takes. A frame larger than that runs eagerly, like every tower without
graphs, so the tower is kept on the host, too.

``TileGraphs`` has one graph for each number of tiles. A step's tiles run in several launches, each with the largest of
a few numbers that is not more than the tiles left: 6 run as 4, 1 and 1. So there is no padding, and nothing is compiled
for the size of an image.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec

from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.multimodal.towers.patches import PADDING, Frames, PatchTower
from model_runner_base.inputs.multimodal.towers.tiles import BETWEEN, TiledTower, tile_shape
from model_runner_base.inputs.pool import EmbeddingPool, PoolRows
from model_runner_base.models.tower_placement import towers_of
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.sizes import geometric


def check_num_embeds(item: MultiModalFeatureSpec, count: int) -> None:
    """Raises RuntimeError unless ``count`` embeddings are as many as the item's tokens, which the scheduler counts."""
    if count != item.mm_position.get_num_embeds():
        raise RuntimeError(
            f"the encoder made {count} embeddings of a {item.modality}, but its prompt has "
            f"{item.mm_position.get_num_embeds()} tokens for them"
        )


class EncoderGraphs:
    """Interface of encoder graphs; this default has none, so the model's towers run eagerly."""

    def encode(self, items: Sequence[MultiModalFeatureSpec]) -> Sequence[MultiModalFeatureSpec]:
        """Writes the embeddings of all items that graphs can encode to the pool; returns the other items."""
        return items

    def step_memory(self) -> int:
        """Bytes of device memory that a graph needs while it runs; an estimate."""
        return 0

    def warm_up(self) -> None:
        """Runs each graph once, on padding only."""


EAGER = EncoderGraphs()


FEWEST, MOST = 256, 4096
"""Patches of the smallest and of the largest graph; sizes between double. An image of 896 x 896 pixels has 4,096
patches of 14 x 14."""
QUERIES = 512
"""Number of patches whose attention scores a device is expected to hold at a time."""

PIXELS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


class PatchGraphs(EncoderGraphs):
    def __init__(
        self, tower: PatchTower, pool: EmbeddingPool, pool_rows: PoolRows, wrap: WrapFunction, device_ops: DeviceOps
    ) -> None:
        self._tower = tower
        self._pool = pool
        self._pool_rows = pool_rows
        self._device_ops = device_ops
        self._sizes = geometric(FEWEST, min(MOST, pool.num_rows * tower.unit))
        tower.place(device_ops.place)
        self._run = wrap(self._encode_patches, pool.tensors)

    def _encode_patches(self, pool: torch.Tensor, places: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Encodes ``inputs`` (``PatchTower.encode``) and writes the results to ``places`` [P / merged] of the pool."""
        pool.index_put_((places,), self._tower.encode(*inputs).to(pool.dtype))
        return places.clone()

    def encode(self, items: Sequence[MultiModalFeatureSpec]) -> Sequence[MultiModalFeatureSpec]:
        left = list[MultiModalFeatureSpec]()
        for item in items:
            assert item.data is not None
            contents: Any = item.data.get_data()
            pixels, grid = (contents.get(name) for name in PIXELS[item.modality])
            frames, height, width = grid.flatten().tolist()
            if pixels is None or height * width > self._sizes[-1]:
                left.append(item)
                continue
            check_num_embeds(item, count := len(pixels) // self._tower.unit)
            rows = self._pool_rows.take(item.identifier, count)
            for of_frames in self._tower.frames(pixels, (frames, height, width), self._sizes[-1]):
                self._launch(of_frames, rows[of_frames.embed_index])
        return left

    def _launch(self, frames: Frames, rows: np.ndarray) -> None:
        count = len(frames.pixels)
        size = next(size for size in self._sizes if size >= count)
        dtype = self._pool.tensors[0].dtype
        padded = [
            torch.nn.functional.pad(x.detach().to(dtype), (0, 0, 0, size - count))
            for x in (frames.pixels, frames.cos, frames.sin, *frames.embeddings)
        ]
        pixels, cos, sin, *embeddings = map(self._device_ops.upload, padded)
        segments = np.pad(frames.segments, ((0, 0), (0, size - count)), constant_values=PADDING)
        places = np.pad(rows, (0, (size - count) // self._tower.unit), constant_values=self._pool.num_rows)
        to_device = self._device_ops.to_device
        self._run(self._pool.tensors[0], to_device(places), pixels, cos, sin, to_device(segments), *embeddings)

    def warm_up(self) -> None:
        for size in self._sizes[::-1]:
            frames = self._tower.blank(size)
            self._launch(frames, np.full(len(frames.embed_index), self._pool.num_rows, np.int32))

    def step_memory(self) -> int:
        """Bytes in float32 of the largest graph's inputs, one layer's outputs, and attention scores of some patches."""
        visual, most = self._tower.on_device, self._sizes[-1]
        outputs = sum(max(p.shape) for p in visual.blocks[0].parameters() if p.dim() == 2)
        sent = self._tower.blank(self._tower.unit).pixels.shape[1]
        return 4 * most * (2 * sent + 2 * outputs + 2 * visual.num_heads * min(QUERIES, most))


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
        pool_rows: PoolRows,
        wrap: WrapFunction,
        device_ops: DeviceOps,
    ) -> None:
        self._tower = tower
        self._model = model
        self._pool = pool
        self._pool_rows = pool_rows
        self._device_ops = device_ops
        self._vision = model.config.vision_config
        self._shape = tile_shape(self._vision)
        self._shaped = torch.nn.Unflatten(1, self._shape)
        """Gives tiles their shape; a module, whose numbers are constants of a graph."""
        self._embeds_per_tile = tower.num_embeds(model)
        most = min(pool.num_rows // self._embeds_per_tile, MOST_PATCHES // self._num_patches)
        self._counts = [count for count in TILES if count <= most] or [1]
        for module in towers_of(model):
            device_ops.place(module)
        self._run = wrap(self._encode_tiles, pool.tensors)

    def _encode_tiles(self, pool: torch.Tensor, tiles: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Encodes ``tiles`` [N, pixels] and writes the results to ``places`` [N * embeddings of a tile] of the pool."""
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
            order = self._tower.order(self._model, contents, len(tiles), self._embeds_per_tile)
            check_num_embeds(item, len(order))
            rows = self._pool_rows.take(item.identifier, len(order))
            # Some processors pad the images of one prompt to the same number of tiles.
            tiles = tiles[: order.max() // self._embeds_per_tile + 1]
            places = np.full(len(tiles) * self._embeds_per_tile, self._pool.num_rows, np.int32)
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
            to = places[begin * self._embeds_per_tile : (begin + count) * self._embeds_per_tile]
            of = self._device_ops.upload(tiles[begin : begin + count].clone())
            self._run(self._pool.tensors[0], of, self._device_ops.to_device(to))
            begin += count

    def warm_up(self) -> None:
        for count in self._counts:
            nowhere = np.full(count * self._embeds_per_tile, self._pool.num_rows, np.int32)
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
