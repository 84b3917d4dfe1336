"""Embeddings on the device, which a step's graph reads in place of the model's own table."""

from collections.abc import Iterator

import numpy as np
import torch

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.sizes import geometric

SMALLEST_PIECE = 64
"""Length of the shortest piece; those of longer ones double, up to the longest."""
LONGEST_PIECE = 4096
"""Largest number of embeddings that are written at once: a context may hold videos of 100,000."""


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
        self.longest_piece = min(longest_piece, LONGEST_PIECE)
        self._pieces = geometric(SMALLEST_PIECE, self.longest_piece) if longest_piece else []

    def write(self, rows: np.ndarray, embeds: torch.Tensor) -> None:
        """Puts ``embeds`` [N, H] into ``rows`` [N] int32, in pieces."""
        for begin in range(0, len(rows), self.longest_piece or 1):
            piece = slice(begin, begin + self.longest_piece)
            self._write_piece(rows[piece], embeds[piece])

    def _write_piece(self, rows: np.ndarray, embeds: torch.Tensor) -> None:
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


class PoolRows:
    """Assigns rows 0 to ``num_rows`` - 1 to items, by identifier.

    The scheduler counts rows, too, and gives items up before it asks for more rows than there are. Until then an item
    that no request needs stays, so that another request with the same image finds it. An item's rows need not be
    consecutive, so any free rows will do.
    """

    def __init__(self, num_rows: int) -> None:
        self._free: np.ndarray = np.arange(num_rows, dtype=np.int32)
        self._rows: dict[str, np.ndarray] = {}

    def __getitem__(self, identifier: str) -> np.ndarray:
        """[N] int32, the rows of an item's N embeddings."""
        return self._rows[identifier]

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._rows

    def __iter__(self) -> Iterator[str]:
        """Yields the identifiers of all items that have rows."""
        return iter([*self._rows])

    def take(self, identifier: str, count: int) -> np.ndarray:
        """Assigns rows to an item that has none; raises RuntimeError if too few are free."""
        assert identifier not in self._rows
        if count > len(self._free):
            raise RuntimeError(f"{count} encoder outputs are to be kept, but only {len(self._free)} rows are free")
        self._rows[identifier], self._free = self._free[:count], self._free[count:]
        return self._rows[identifier]

    def give_up(self, identifier: str) -> None:
        """Frees an item's rows; nothing happens if it has none."""
        rows = self._rows.pop(identifier, None)
        if rows is not None:
            self._free = np.concatenate((self._free, rows))

    def clear(self) -> None:
        """Frees all rows."""
        for identifier in self:
            self.give_up(identifier)
