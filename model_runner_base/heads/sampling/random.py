"""Counter-based random numbers: a request's noise depends on its seed and position alone.

No generator state is kept, so a request's draws stay the same if its row changes, if it is preempted or chunked, and
whatever it is batched with. The mixing function is the 32-bit "lowbias32" finaliser of Chris Wellons' hash-prospector
(public domain), applied once for each of seed, position and token id. All arithmetic is elementwise int32.
"""

import torch

_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts int32 logically.

    The sign bit is moved separately, because ``>>`` of a negative number keeps the sign, and some devices divide and
    round instead.
    """
    return ((x & 0x7FFFFFFF) >> bits) | ((x < 0).to(torch.int32) * (1 << (31 - bits)))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 16)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 15)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 16)


def gumbel_noise(
    seed_low: torch.Tensor, seed_high: torch.Tensor, position: torch.Tensor, count: int, start: int = 0
) -> torch.Tensor:
    """Standard Gumbel noise [S, count] float32 for ``count`` tokens from ``start`` on; the arguments are [S] int32.

    Adding it to logits and taking the maximum draws from their softmax (Gumbel-max trick).
    """
    stream = _mix(_mix(seed_low) ^ seed_high)
    stream = _mix(stream ^ (position * _GOLDEN))
    index = torch.arange(count, dtype=torch.int32, device=position.device) + start
    bits = _mix(_mix(stream.view(-1, 1) ^ (index.view(1, -1) * _GOLDEN)) + stream.view(-1, 1))
    return _gumbel(bits)


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel values from random int32 bits; finite for all of them.

    23 bits and a half fit float32's 24-bit mantissa exactly, so the uniform value never rounds to 1.
    """
    uniform = (_shift_right(bits, 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
