"""Towers of patches as graphs on the device: one graph for each number of patches; its rows stay in the pool.

No patch sees another frame. So an item runs frame by frame, as many frames at a time as the largest graph takes. A
frame larger than that runs eagerly, like every tower without graphs, so the tower is kept on the host, too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec

from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.multimodal.towers.encoder_graphs import EncoderGraphs, check_rows
from model_runner_base.inputs.multimodal.towers.patches import PADDING, Frames, PatchTower
from model_runner_base.inputs.pool import EmbeddingPool, EncoderRows
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.sizes import geometric

FEWEST, MOST = 256, 4096
"""Patches of the smallest and of the largest graph; sizes between double. An image of 896 x 896 pixels has 4,096
patches of 14 x 14."""
QUERIES = 512
"""Number of patches whose attention scores a device is expected to hold at a time."""

PIXELS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


class PatchGraphs(EncoderGraphs):
    def __init__(
        self, tower: PatchTower, pool: EmbeddingPool, rows: EncoderRows, wrap: WrapFunction, device_ops: DeviceOps
    ) -> None:
        self._tower = tower
        self._pool = pool
        self._rows = rows
        self._device_ops = device_ops
        self._sizes = geometric(FEWEST, min(MOST, pool.num_rows * tower.unit))
        tower.place(device_ops.place)
        self._run = wrap(self._encode_patches, pool.tensors)

    def _encode_patches(self, pool: torch.Tensor, places: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Encodes ``inputs`` (``PatchTower.encode``) and writes the rows to ``places`` [P / merged] of the pool."""
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
            check_rows(item, count := len(pixels) // self._tower.unit)
            rows = self._rows.take(item.identifier, count)
            for of_frames in self._tower.frames(pixels, (frames, height, width), self._sizes[-1]):
                self._launch(of_frames, rows[of_frames.rows])
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
            self._launch(frames, np.full(len(frames.rows), self._pool.num_rows, np.int32))

    def step_memory(self) -> int:
        """Bytes in float32 of the largest graph's inputs, one layer's outputs, and attention scores of some patches."""
        visual, most = self._tower.on_device, self._sizes[-1]
        outputs = sum(max(p.shape) for p in visual.blocks[0].parameters() if p.dim() == 2)
        sent = self._tower.blank(self._tower.unit).pixels.shape[1]
        return 4 * most * (2 * sent + 2 * outputs + 2 * visual.num_heads * min(QUERIES, most))
