"""Towers that see an image as a sequence of patches of any length (the Qwen-VL families): which of their parts are
graphs, and what the host works out from an image's grid.

Rotary embeddings, windows, positions and the bounds of attention depend on grids, so the host works them out with
vLLM's own functions. With these, the patches of a frame are a sequence like any other, so one graph for each number of
patches serves frames of all sizes. Missing patches are padding, which attends to itself.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from model_runner_base.models.tower_placement import copied

PADDING = -1
"""Segment of padding patches."""


@dataclass(frozen=True)
class Frames:
    """Frames of an item: P patches, in the tower's order, which become P / merged embeddings."""

    pixels: torch.Tensor
    """[P, numbers in a patch]"""
    cos: torch.Tensor
    sin: torch.Tensor
    """[P, half of a head]"""
    segments: np.ndarray
    """[kinds, P] int32: in layers of each kind, patches with the same number see each other."""
    embed_index: np.ndarray
    """[P / merged] indices, among the item's embeddings, of those that these patches become."""
    embeddings: tuple[torch.Tensor, ...] = ()
    """Tensors [P, hidden] that some towers add to the embeddings of the patches."""


class PatchTower:
    """Qwen2-VL: in all layers, each frame sees itself."""

    submodules: tuple[str, ...] = ("patch_embed", "blocks", "merger")
    """Submodules of the tower that run in graphs."""

    def __init__(self, visual: Any) -> None:
        """``visual`` is the tower on the host, and stays there."""
        self._visual = visual
        self.unit = visual.spatial_merge_size**2
        """Number of patches that become one embedding."""
        self.on_device: Any = copy(visual)
        """The tower as graphs run it; ``place`` moves its ``submodules`` to the device."""
        self.on_device._modules = dict(visual._modules)
        for name in self.submodules:
            setattr(self.on_device, name, copied(getattr(visual, name)))

    def place(self, place: Callable[[nn.Module], None]) -> None:
        """Moves the submodules that graphs run to the device."""
        for name in self.submodules:
            place(getattr(self.on_device, name))

    def encode(
        self,
        pixels: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        segments: torch.Tensor,
        *embeddings: torch.Tensor,
    ) -> torch.Tensor:
        """Encodes frames, with or without padding, to embeddings [P / merged, W]. Traceable."""
        visual = self.on_device
        hidden = sum(embeddings, start=visual.patch_embed(pixels)).unsqueeze(1)
        beneath = []
        for number, block in enumerate(visual.blocks):
            seen = segments[self._kind_of(number)]
            rotation = {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}
            hidden = block(hidden, cu_seqlens=seen, **rotation, max_seqlen=None)
            beneath += self._beneath(number, hidden)
        return torch.cat((visual.merger(hidden), *beneath), dim=1)

    def frames(self, pixels: torch.Tensor, grid: tuple[int, int, int], most: int) -> Iterator[Frames]:
        """Yields an item's frames, at most ``most`` patches at a time; ``grid`` is frames, height, width."""
        num_frames, height, width = grid
        of_frame = height * width
        at_a_time = most // of_frame
        for first in range(0, num_frames, at_a_time):
            count = min(at_a_time, num_frames - first)
            begin, end = first * of_frame, (first + count) * of_frame
            yield self._prepare(pixels[begin:end], (count, height, width), begin // self.unit)

    def blank(self, count: int) -> Frames:
        """Makes a frame of ``count`` patches, all zeros."""
        merge = self._visual.spatial_merge_size
        pixels = torch.zeros((count, self._visual.patch_embed.proj.weight[0].numel()))
        return self._prepare(pixels, (1, merge, count // merge), 0)

    def _prepare(self, pixels: torch.Tensor, grid: tuple[int, int, int], first_embed: int) -> Frames:
        count, height, width = grid
        cos, sin = type(self._visual).rot_pos_emb(self._on_host, [list(grid)])
        segments = np.repeat(np.arange(count, dtype=np.int32), height * width)[None]
        embed_index = first_embed + np.arange(len(pixels) // self.unit)
        return Frames(pixels, cos, sin, segments, embed_index, self._positions(grid))

    @property
    def _on_host(self) -> Any:
        """The tower as vLLM's functions read it."""
        return self._visual

    def _positions(self, grid: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
        return ()

    def _kind_of(self, number: int) -> int:
        return 0

    def _beneath(self, number: int, hidden: torch.Tensor) -> list[torch.Tensor]:
        return []


class WindowTower(PatchTower):
    """Qwen2.5-VL: in most layers a window of a frame sees itself, and patches are ordered by window.

    The attention's ``reach`` of those layers is the largest number of patches in a window.
    """

    def __init__(self, visual: Any) -> None:
        super().__init__(visual)
        for number, block in enumerate(self.on_device.blocks):
            if self._kind_of(number):
                block.attn.attn.reach = (visual.window_size // visual.patch_size) ** 2

    def _prepare(self, pixels: torch.Tensor, grid: tuple[int, int, int], first_embed: int) -> Frames:
        count, height, width = grid
        cos, sin, order, ends, _ = self._visual.get_rope_by_thw(*grid)
        windows = np.diff(ends.numpy(), prepend=0)
        segments = np.stack(
            (
                np.repeat(np.arange(count, dtype=np.int32), height * width),
                np.repeat(np.arange(len(windows), dtype=np.int32), windows),
            )
        )
        merged = pixels.view(-1, self.unit, pixels.shape[1])[order].flatten(0, 1)
        return Frames(merged, cos, sin, segments, first_embed + order.numpy())

    def _kind_of(self, number: int) -> int:
        return 0 if number in self._visual.fullatt_block_indexes else 1


class DeepTower(PatchTower):
    """Qwen3-VL: positions are added to the patches, and embeddings hold the outputs of some layers in addition."""

    submodules = (*PatchTower.submodules, "deepstack_merger_list")

    @property
    def _on_host(self) -> Any:
        visual = self._visual
        names = "num_grid_per_side", "spatial_merge_size", "pos_embed", "dtype", "rotary_pos_emb", "rot_pos_ids"
        return SimpleNamespace(device=torch.device("cpu"), **{name: getattr(visual, name) for name in names})

    def _positions(self, grid: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
        return (type(self._visual).fast_pos_embed_interpolate(self._on_host, [list(grid)]),)

    def _beneath(self, number: int, hidden: torch.Tensor) -> list[torch.Tensor]:
        indexes = self._visual.deepstack_visual_indexes
        if number not in indexes:
            return []
        return [self.on_device.deepstack_merger_list[indexes.index(number)](hidden)]


PATCH_TOWERS: dict[str, type[PatchTower]] = {
    "Qwen2VLForConditionalGeneration": PatchTower,
    "Qwen2_5_VLForConditionalGeneration": WindowTower,
    "Qwen3VLForConditionalGeneration": DeepTower,
    "Qwen3VLMoeForConditionalGeneration": DeepTower,
    "Qwen3_5ForConditionalGeneration": DeepTower,
    "Qwen3_5MoeForConditionalGeneration": DeepTower,
}
"""Towers with patches, by architecture."""
