"""``nki.language``: dtypes, operators, memory, loops."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nki_standin.memory import HardwareError, Storage, Tensor, VirtualRegister

float32, bfloat16, float16, int32 = "float32", "bfloat16", "float16", "int32"
sbuf, psum, shared_hbm, private_hbm = "sbuf", "psum", "shared_hbm", "private_hbm"

# Operators are passed to nki.isa by name; these are their meaning.
add, multiply, maximum = np.add, np.multiply, np.maximum
greater, greater_equal, less = np.greater, np.greater_equal, np.less
exp, tanh = np.exp, np.tanh


def ndarray(shape: tuple[int, ...], dtype: str, buffer: str = sbuf, name: str = "") -> Tensor:
    storage = Storage(shape, dtype, buffer)
    return Tensor(storage, storage.flat.reshape(shape), shape, is_whole=True)


def fori_loop(
    lower: int | VirtualRegister, upper: int | VirtualRegister, body_fun: Callable[[Any], None], step: int = 1
) -> None:
    if not isinstance(step, int) or step < 1:
        raise HardwareError("the step of a loop is a positive number known when the kernel is compiled")
    ends = [end.read() if isinstance(end, VirtualRegister) else end for end in (lower, upper)]
    for i in range(*ends, step):
        if body_fun(VirtualRegister(i)) is not None:
            raise HardwareError("the body of a loop returns nothing")
