"""Embeddings on the device, which a step's graph reads in place of the model's own table."""

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.sizes import geometric

SMALLEST_PIECE = 64
"""Length of the shortest piece. Embeddings are written as one piece, whose length is doubled up to the longest."""


def _write(pool: torch.Tensor, rows: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """Writes ``embeds`` [N, H] to ``rows`` [N] of the pool, in place; returns the rows."""
    pool.index_put_((rows,), embeds)
    return rows.clone()


class EmbeddingPool:
    """Pool of embeddings, ``tensors[0]`` [num_rows + 1, H]. The last row takes the padding of pieces."""

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        longest_piece: int,
        wrap: WrapFunction,
        device_ops: DeviceOps,
    ) -> None:
        self.num_rows = num_rows
        self.tensors = [device_ops.zeros((num_rows + 1, width), dtype)]
        """One tensor, the pool; a graph that writes it may replace it here."""
        self._device_ops = device_ops
        self._write = wrap(_write, self.tensors)
        self._pieces = geometric(SMALLEST_PIECE, longest_piece)

    def write(self, rows: np.ndarray, embeds: torch.Tensor) -> None:
        """Puts ``embeds`` [N, H] into ``rows`` [N] int32; N is at most the longest piece."""
        length = next(piece for piece in self._pieces if piece >= len(rows))
        padded_rows = np.full(length, self.num_rows, np.int32)
        padded_rows[: len(rows)] = rows
        pool = self.tensors[0]
        padded = torch.zeros((length, pool.shape[1]), dtype=pool.dtype, device=embeds.device)
        padded[: len(rows)] = embeds
        self._write(pool, self._device_ops.to_device(padded_rows), self._device_ops.upload(padded))

    def warm_up(self) -> None:
        """Writes a piece of each length, of padding only."""
        width = self.tensors[0].shape[1]
        for length in self._pieces:
            self.write(np.full(length, self.num_rows, np.int32), torch.zeros((length, width)))
