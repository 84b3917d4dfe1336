"""Rows of the pool that hold the encoder's outputs for each item."""

from collections.abc import Iterator

import numpy as np


class EncoderRows:
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
