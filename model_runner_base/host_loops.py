"""Loops over tokens, tiles and pairs that a step cannot do without, compiled for the host by numba.

As array expressions they are some fifty NumPy calls a step, each over a few hundred numbers, and most of the time goes
into the calls. Without numba, or with its own ``NUMBA_DISABLE_JIT=1``, the same functions run as plain Python: slower,
with the same results.

Compiled code is kept on disk, beside the file that the loop is in or where ``NUMBA_CACHE_DIR`` says, as long as that
file stays the same: so a loop reads no value that another file defines. Types decide what is compiled, so arguments
keep theirs: int64 for what describes a batch, int32 for what is sent to the device.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function, compiled when it is first called with arguments of some types."""
    try:
        from numba import njit
    except ImportError:
        return function
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # There is no directory that can be written to.
        return njit(function)
