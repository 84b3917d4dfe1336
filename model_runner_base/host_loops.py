"""Loops over tokens, tiles and pairs that a step cannot do without, compiled for the host by numba.

As array expressions they are some fifty NumPy calls a step, each over a few hundred numbers, and most of the time goes
into the calls. Without numba, or with its own ``NUMBA_DISABLE_JIT=1``, the same functions run as plain Python: slower,
with the same results.

Compiled code is kept on disk, under ``NUMBA_CACHE_DIR`` or else ``VLLM_CACHE_ROOT``, and is found again as long as the
file that the loop is in stays the same: so a loop reads no value that another file defines. Types decide what is
compiled, so arguments keep theirs: int64 for what describes a batch, int32 for what is sent to the device.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vllm import envs

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function, compiled when it is first called with arguments of some types."""
    try:
        from numba import config, njit
    except ImportError:
        return function
    try:
        folder = cache_folder(Path(function.__code__.co_filename))
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # There is no file to tell versions by, or no directory that can be written to.
        return njit(function)
    kept = config.CACHE_DIR
    config.CACHE_DIR = str(folder)  # It is read while the function is wrapped.
    try:
        return njit(cache=True)(function)
    finally:
        config.CACHE_DIR = kept


def cache_folder(file: Path) -> Path:
    """The directory of what is compiled from this text of a file by this version of numba.

    numba itself keeps all versions under one name. It writes its index before the code that the index names; a process
    that starts between the two, after an update, would load the code of the version before.

    Raises OSError where the file cannot be read.
    """
    import numba

    version = hashlib.sha256(numba.__version__.encode() + b"\0" + file.read_bytes()).hexdigest()[:16]
    return Path(numba.config.CACHE_DIR or os.path.join(envs.VLLM_CACHE_ROOT, "host_loops")) / version
