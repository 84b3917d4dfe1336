"""``nki.isa``: instructions. Engines compute in float32 and round what they write."""

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from nki_standin.memory import PARTITIONS, PSUM_BANK_BYTES, HardwareError, Tensor, VirtualRegister

MAX_STATIONARY = 128
MAX_MOVING = 512


class oob_mode(Enum):
    error = 0
    skip = 1


class reduce_cmd(Enum):
    idle = 0
    reset_reduce = 3


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise HardwareError(message)


def _on_chip(*tensors: Tensor, memory: str = "") -> None:
    for tensor in tensors:
        _require(tensor.on_chip, f"an engine cannot reach {tensor.buffer}: move it by dma_copy")
        _require(memory in ("", tensor.buffer), f"this operand must lie in {memory}, not {tensor.buffer}")
        _require(tensor.shape[0] <= PARTITIONS, f"{tensor.shape[0]} partitions")
        _require(tensor.first_partition % 32 == 0, f"an engine cannot start at partition {tensor.first_partition}")


def _value(tensor: Tensor) -> np.ndarray:
    assert tensor.array is not None
    return tensor.array.astype(np.float32)


def _same_tile(dst: Tensor, *others: Tensor) -> None:
    _on_chip(dst, *others)
    for other in others:
        same = dst.shape[0] == other.shape[0] and np.prod(dst.shape) == np.prod(other.shape)
        _require(same, f"tiles of {dst.shape} and {other.shape}")


def _operand(operand: Any, data: Tensor) -> Any:
    """A number, or a column that is broadcast along the free dimension."""
    if not isinstance(operand, Tensor):
        return np.float32(operand)
    _on_chip(operand)
    _require(operand.shape == (data.shape[0], 1), f"a vector operand is {(data.shape[0], 1)}, not {operand.shape}")
    _require(operand.dtype == "float32", f"a vector operand is float32, not {operand.dtype}")
    return _value(operand)


def dma_copy(dst: Tensor, src: Tensor, oob_mode: oob_mode = oob_mode.error) -> None:
    for tensor in (dst, src):
        _require(tensor.buffer != "psum", "dma_copy cannot reach PSUM: use tensor_copy")
    _require(dst.shape == src.shape, f"copy of {src.shape} to {dst.shape}")
    _require(dst.dtype == src.dtype, f"copy of {src.dtype} to {dst.dtype}: DMA moves bytes")
    _require(dst.flat_index is None or src.flat_index is None, "only one side may be indirect")
    if src.flat_index is None and dst.flat_index is None:
        dst.write(src.array)  # type: ignore[arg-type]
        return
    indirect = src if src.flat_index is not None else dst
    index, flat = indirect.flat_index, indirect.storage.flat
    assert index is not None
    inside = ((index >= 0) & (index < len(flat))).reshape(len(index), -1).all(axis=1)
    _require(bool(inside.all()) or oob_mode.name == "skip", f"indirect access out of bounds: {index[~inside][:1]}")
    if indirect is src:
        assert dst.array is not None
        dst.array[inside] = flat[index[inside]]
    else:
        assert src.array is not None
        flat[index[inside]] = src.array[inside]


def nc_matmul(dst: Tensor, stationary: Tensor, moving: Tensor, accumulate: bool | None = None) -> None:
    _on_chip(stationary, moving, memory="sbuf")
    _on_chip(dst, memory="psum")
    (k, m), (k2, n) = stationary.shape, moving.shape
    _require(k == k2 <= PARTITIONS, f"contraction over {k} and {k2} partitions, at most {PARTITIONS}")
    _require(m <= MAX_STATIONARY, f"{m} stationary columns, at most {MAX_STATIONARY}")
    _require(n <= MAX_MOVING, f"{n} moving columns, at most {MAX_MOVING}")
    _require(dst.shape == (m, n) and dst.dtype == "float32", f"{(m, n)} float32 into {dst.shape} {dst.dtype}")
    _require(n * 4 <= PSUM_BANK_BYTES, "the result of a product lies in one PSUM bank")
    both = (stationary.dtype == "float32") == (moving.dtype == "float32")
    _require(both, f"{stationary.dtype} with {moving.dtype}: float32 goes with float32 only")
    _require(accumulate is not None, "the stand-in knows no automatic accumulation")
    product = _value(stationary).T @ _value(moving)
    dst.write(product + _value(dst) if accumulate else product)


def nc_transpose(dst: Tensor, data: Tensor) -> None:
    _on_chip(data, memory="sbuf")
    _on_chip(dst, memory="psum")
    p, n = data.shape
    _require(p <= 128 and n <= 128, f"the tensor engine transposes up to 128 x 128, not {data.shape}")
    _require(dst.shape == (n, p) and dst.dtype == data.dtype, f"{data.shape} {data.dtype} to {dst.shape} {dst.dtype}")
    dst.write(_value(data).T)


def memset(dst: Tensor, value: float) -> None:
    _on_chip(dst)
    _require(isinstance(value, int if dst.dtype == "int32" else float), f"{value} for {dst.dtype}")
    dst.write(np.full(dst.shape, value))


def tensor_copy(dst: Tensor, src: Tensor) -> None:
    _same_tile(dst, src)
    dst.write(_value(src).reshape(dst.shape))


def iota(dst: Tensor, pattern: list[list[int]], offset: int = 0, channel_multiplier: int = 0) -> None:
    _on_chip(dst)
    _require(dst.dtype == "int32", "iota writes int32 here")
    value = offset + channel_multiplier * np.arange(dst.shape[0])
    for step, count in pattern:
        value = np.add.outer(value, step * np.arange(count))
    _require(value.size == np.prod(dst.shape), f"{pattern} for {dst.shape}")
    dst.write(value.reshape(dst.shape))


def tensor_scalar(
    dst: Tensor, data: Tensor, op0: Callable, operand0: Any, op1: Callable | None = None, operand1: Any = None
) -> None:
    _same_tile(dst, data)
    value = op0(_value(data), _operand(operand0, data)).astype(np.float32)
    if op1 is not None:
        value = op1(value, _operand(operand1, data))
    dst.write(value.reshape(dst.shape))


def tensor_tensor(dst: Tensor, data1: Tensor, data2: Tensor, op: Callable) -> None:
    _same_tile(dst, data1, data2)
    _require("sbuf" in (data1.buffer, data2.buffer), "the two inputs cannot both lie in PSUM")
    dst.write(op(_value(data1), _value(data2).reshape(data1.shape)).reshape(dst.shape))


def scalar_tensor_tensor(
    dst: Tensor, data: Tensor, op0: Callable, operand0: Any, op1: Callable, operand1: Tensor
) -> None:
    _same_tile(dst, data, operand1)
    _require("sbuf" in (data.buffer, operand1.buffer), "the two inputs cannot both lie in PSUM")
    dst.write(op1(op0(_value(data), _operand(operand0, data)), _value(operand1)).reshape(dst.shape))


def tensor_reduce(dst: Tensor, op: Any, data: Tensor, axis: int, keepdims: bool = False) -> None:
    _on_chip(dst, data)
    _require(axis == len(data.shape) - 1 > 0, "a reduction ends at the last free dimension")
    value = op.reduce(_value(data), axis=axis, keepdims=keepdims)
    _require(value.shape == dst.shape, f"{value.shape} into {dst.shape}")
    dst.write(value)


def reciprocal(dst: Tensor, data: Tensor) -> None:
    _same_tile(dst, data)
    dst.write(1 / _value(data))


def activation(
    dst: Tensor,
    op: Callable,
    data: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    reduce_op: Any = None,
    reduce_res: Tensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
) -> None:
    _same_tile(dst, data)
    value = op(_value(data) * np.float32(scale) + (_operand(bias, data) if bias is not None else 0))
    dst.write(value.reshape(dst.shape))
    if reduce_res is not None:
        _require(reduce_op is np.add and reduce_cmd.name == "reset_reduce", "activation only sums, from 0")
        _on_chip(reduce_res)
        reduce_res.write(value.reshape(len(value), -1).sum(axis=1, keepdims=True))


def register_alloc(x: int | None = None) -> VirtualRegister:
    return VirtualRegister(x)


def register_load(dst: VirtualRegister, src: Tensor) -> None:
    _require(np.prod(src.shape) == 1 and src.dtype == "int32" and src.buffer != "psum", "a register holds one int32")
    assert src.array is not None
    dst.load(int(src.array.item()))
