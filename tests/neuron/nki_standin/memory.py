"""Tensors of the stand-in, in HBM, SBUF or PSUM, and the parts of the two small memories that are in use."""

import weakref
from typing import Any

import numpy as np
import torch

PARTITIONS = 128
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048
SBUF_PARTITION_BYTES = 192 * 1024
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}
POISON = -(2**30) - 7


class HardwareError(Exception):
    """Error of what a NeuronCore cannot do."""


class Usage:
    """Bytes a partition in SBUF, and banks in PSUM. Memory that no name refers to any more is free again."""

    def __init__(self) -> None:
        self.used = {"sbuf": 0, "psum": 0}
        self.peak = {"sbuf": 0, "psum": 0}
        self.limit = {"sbuf": SBUF_PARTITION_BYTES, "psum": PSUM_BANKS}

    def take(self, buffer: str, amount: int) -> None:
        self.used[buffer] += amount
        self.peak[buffer] = max(self.peak[buffer], self.used[buffer])
        if self.used[buffer] > self.limit[buffer]:
            raise HardwareError(f"{buffer} is full: {self.used[buffer]} of {self.limit[buffer]} in use")

    def give_back(self, buffer: str, amount: int) -> None:
        self.used[buffer] -= amount


usage = Usage()


def start() -> None:
    """Empties both memories, as a new kernel finds them."""
    global usage
    usage = Usage()


class Storage:
    """Memory of one allocation. Floats of any width are kept as float32, already rounded."""

    def __init__(self, shape: tuple[int, ...], dtype: str, buffer: str) -> None:
        if dtype not in ITEM_BYTES:
            raise HardwareError(f"no such dtype here: {dtype}")
        self.dtype, self.buffer = dtype, buffer
        is_int = dtype == "int32"
        self.flat = np.full(int(np.prod(shape)), POISON if is_int else np.nan, np.int32 if is_int else np.float32)
        if buffer in ("sbuf", "psum"):
            if len(shape) < 2 or shape[0] > PARTITIONS:
                raise HardwareError(f"a tile has 1 to {PARTITIONS} partitions and a free dimension, not {shape}")
            size = int(np.prod(shape[1:])) * ITEM_BYTES[dtype]
            amount = size if buffer == "sbuf" else -(-size // PSUM_BANK_BYTES)
            usage.take(buffer, amount)
            weakref.finalize(self, usage.give_back, buffer, amount)


class Tensor:
    """A view of a storage. ``flat_index`` [shape] is set where an index vector chose rows: it may be out of bounds."""

    def __init__(
        self,
        storage: Storage,
        array: np.ndarray | None,
        shape: tuple[int, ...],
        is_whole: bool = False,
        first_partition: int = 0,
        flat_index: np.ndarray | None = None,
    ) -> None:
        self.storage, self.array, self.shape = storage, array, tuple(shape)
        self.is_whole, self.first_partition, self.flat_index = is_whole, first_partition, flat_index

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def buffer(self) -> str:
        return self.storage.buffer

    @property
    def on_chip(self) -> bool:
        return self.buffer in ("sbuf", "psum")

    def __getitem__(self, key: Any) -> "Tensor":
        assert self.array is not None
        key = key if isinstance(key, tuple) else (key,)
        first = self.first_partition
        for slice_, size in zip(key, self.shape, strict=True):
            start = slice_.start or 0
            stop = size if slice_.stop is None else slice_.stop
            if slice_.step is not None or not 0 <= start < stop <= size:
                raise HardwareError(f"slice {start}:{stop} of {size}")
        first += key[0].start or 0
        array = self.array[key]
        return Tensor(self.storage, array, array.shape, first_partition=first)

    def reshape(self, shape: tuple[int, ...]) -> "Tensor":
        if not self.is_whole or self.on_chip or np.prod(shape) != np.prod(self.shape):
            raise HardwareError(f"{self.shape} in {self.buffer} cannot be reshaped to {shape}")
        return Tensor(self.storage, self.storage.flat.reshape(shape), shape, is_whole=True)

    def ap(
        self,
        pattern: list[list[int]],
        offset: int = 0,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
    ) -> "Tensor":
        """Strides and counts in elements from the tensor's start, as in NKI; a scalar or vector offset counts in
        steps of the tensor's dimension ``indirect_dim``, and the vector replaces the pattern's first step."""
        if not self.is_whole:
            raise HardwareError("an access pattern needs a whole tensor, not a view")
        if self.on_chip and pattern[0][0] != np.prod(self.shape[1:]):
            raise HardwareError("the first step of a pattern on chip must be the whole free dimension")
        stride = int(np.prod(self.shape[indirect_dim + 1 :]))
        shape = tuple(count for _, count in pattern)
        steps = np.array([step for step, _ in pattern])
        base = offset + (scalar_offset.read() * stride if scalar_offset is not None else 0)
        flat = self.storage.flat
        if vector_offset is not None:
            if scalar_offset is not None:
                raise HardwareError("scalar_offset and vector_offset exclude each other")
            if self.on_chip or vector_offset.buffer != "sbuf" or vector_offset.dtype != "int32":
                raise HardwareError("an index vector lies in SBUF as int32 and points into HBM")
            if vector_offset.shape != (shape[0], 1) or vector_offset.shape[0] > PARTITIONS or indirect_dim != 0:
                raise HardwareError(f"index vector {vector_offset.shape} for {shape}")
            inner = np.array(base)
            for step, count in pattern[1:]:
                inner = np.add.outer(inner, step * np.arange(count))
            index = np.add.outer(vector_offset.array[:, 0].astype(np.int64) * stride, inner)
            return Tensor(self.storage, None, shape, flat_index=index)
        last = base + int(((np.array(shape) - 1) * steps).sum())
        if base < 0 or last >= len(flat):
            raise HardwareError(f"elements {base} to {last} of {len(flat)}")
        strides = steps * flat.itemsize
        array = np.lib.stride_tricks.as_strided(flat[base:], shape, tuple(strides))
        return Tensor(self.storage, array, shape)

    def write(self, values: np.ndarray) -> None:
        assert self.array is not None
        self.array[...] = rounded(values, self.dtype)


class VirtualRegister:
    """Opaque to a kernel: no arithmetic, no comparison, no conversion."""

    def __init__(self, value: int | None = None) -> None:
        self._value = value

    def read(self) -> int:
        if self._value is None:
            raise HardwareError("a register is read before it is loaded")
        return self._value

    def load(self, value: int) -> None:
        self._value = value


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as the dtype holds them: rounded to the nearest, ties to even."""
    if dtype == "int32":
        return np.rint(values).astype(np.int32)
    values = np.asarray(values, np.float32)
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(values), np.float32(np.nan), kept.view(np.float32)).reshape(values.shape)
    return values


def from_torch(tensor: torch.Tensor) -> Tensor:
    """A kernel's argument in HBM."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    storage = Storage(tuple(tensor.shape), dtype, "hbm")
    storage.flat[:] = (tensor if dtype == "int32" else tensor.float()).reshape(-1).numpy()
    return Tensor(storage, storage.flat.reshape(tensor.shape), tuple(tensor.shape), is_whole=True)


def to_torch(tensor: Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(tensor.array)).to(getattr(torch, tensor.dtype))
