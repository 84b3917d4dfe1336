"""Numbers as quantised formats pack them, and scales that apply to tensors, rows, groups and blocks."""

import torch

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1 by their three low bits, in the OCP Microscaling specification, section 5.3.3."""


def unpack_integers(packed: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Integers [..., P * (32 // num_bits)] int32 without sign, of words [..., P] int32 with the lowest bits first."""
    shifts = torch.arange(32 // num_bits, dtype=torch.int32, device=packed.device) * num_bits
    return (packed.unsqueeze(-1) >> shifts).bitwise_and_((1 << num_bits) - 1).flatten(-2)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Values [..., 2 * P] float32 of bytes [..., P] uint8 that hold two E2M1 numbers each, the first in the low
    bits."""
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)], dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return values[codes.int()]


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes are E8M0, powers of two with a bias of 127."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.float()


def in_blocks(values: torch.Tensor, numbers: torch.Tensor, block: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of values, and of the scales or zero points of their blocks, that broadcast to each other.

    Args:
        numbers: one for all values, one for each row, or one for each block. Trailing dimensions may be left out.
        block: rows and columns of a block; 1: this dimension has one number for each index, or one for all.

    Raises ValueError if the numbers fit no such division.
    """
    if numbers.numel() == 1:
        return values, numbers.reshape(())
    if numbers.ndim < values.ndim:
        numbers = numbers[(..., *[None] * (values.ndim - numbers.ndim))]
    shape, counts = values.shape, numbers.shape
    for dim in reversed(range(len(shape))):
        count, length, width = counts[dim], shape[dim], block[dim]
        if count == length or (count == 1 and (width == 1 or length <= width)):
            continue
        if width == 1 or count != -(-length // width):
            raise ValueError(f"scales of shape {list(counts)} do not fit {list(shape)} in blocks of {list(block)}")
        if count * width == length:
            values, numbers = values.unflatten(dim, (count, width)), numbers.unsqueeze(dim + 1)
        else:
            numbers = numbers.repeat_interleave(width, dim).narrow(dim, 0, length)
    return values, numbers


def scale_(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """Multiplies values with the scales of their blocks, in place."""
    blocks, scale = in_blocks(values, scale, block)
    blocks.mul_(scale)
    return values


def shift_(values: torch.Tensor, zeros: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """Subtracts the zero points of their blocks from values, in place."""
    blocks, zeros = in_blocks(values, zeros, block)
    blocks.sub_(zeros)
    return values
