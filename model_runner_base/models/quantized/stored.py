"""Tensors in the safetensors files of a local checkpoint, found by name; only what is asked for is read."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from model_runner_base.errors import CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Dtypes by their names in headers. A tensor of another dtype is taken for one of bytes."""


class Entry(NamedTuple):
    """Place, dtype and shape of a stored tensor."""

    file: Path
    dtype: torch.dtype
    shape: list[int]


class StoredTensors:
    """Stored tensors of a directory; raises CheckpointError for a shard that is missing or cut off."""

    def __init__(self, directory: Path) -> None:
        self.entries: dict[str, Entry] = {}
        self._open: dict[Path, Any] = {}
        for file in _files(directory):
            self.entries |= _read_header(file)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def read(self, name: str) -> torch.Tensor:
        file = self.entries[name].file
        if file not in self._open:
            self._open[file] = safe_open(file, "pt")
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor

    def like(self, name: str) -> torch.Tensor:
        """Tensor of the stored one's dtype and shape, without numbers."""
        _, dtype, shape = self.entries[name]
        return torch.empty(shape, dtype=dtype, device="meta")


def _files(directory: Path) -> list[Path]:
    """The files of a checkpoint's index; without one, all that there are."""
    if (directory / INDEX).is_file():
        files = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
        if missing := [name for name in files if not (directory / name).is_file()]:
            raise CheckpointError(f"{directory} has no {missing[0]}, which {INDEX} names: copy the checkpoint again")
        return [directory / name for name in files]
    return sorted(directory.glob("*.safetensors"))


def _read_header(file: Path) -> dict[str, Entry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if 0 < length <= size - 8 else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError:
        raise CheckpointError(f"{file} is cut off in its header: copy the checkpoint again") from None
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["data_offsets"][1] > size - 8 - length:
            raise CheckpointError(f"{file} is cut off in or before {name}: copy the checkpoint again")
    return {
        name: Entry(file, DTYPES.get(entry["dtype"], torch.uint8), entry["shape"]) for name, entry in header.items()
    }
