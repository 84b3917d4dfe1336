"""Loops over tokens, tiles and pairs that a step cannot do without, compiled for the host by numba.

As array expressions they are some fifty NumPy calls a step, each over a few hundred numbers, and most of the time goes
into the calls. Without numba, or with its own ``NUMBA_DISABLE_JIT=1``, the same functions run as plain Python: slower,
with the same results.

Compiled code is kept on disk, under ``NUMBA_CACHE_DIR`` or else ``VLLM_CACHE_ROOT``, and is found again as long as the
file that the loop is in stays the same: so a loop reads no value that another file defines. What older versions left
there stays. Where nothing can be written, every start compiles anew. Types decide what is compiled, so arguments keep
theirs: int64 for what describes a batch, int32 for what is sent to the device.
"""

import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock
from vllm import envs

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function, compiled when it is first called with arguments of some types."""
    try:
        from numba import config, njit
    except ImportError:
        return function
    if config.DISABLE_JIT:
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
    except RuntimeError:  # NUMBA_CACHE_LOCATOR_CLASSES names other places, and none of them will do.
        return njit(function)
    finally:
        config.CACHE_DIR = kept


@contextmanager
def compiling() -> Iterator[None]:
    """Lets one process at a time compile and keep loops.

    Two processes that keep code of two signatures of one loop at a time may give both the same name.
    """
    try:
        os.makedirs(cache_root(), exist_ok=True)
        lock = FileLock(cache_root() / "lock")
        lock.acquire()
    except (OSError, NotImplementedError, ImportError):  # No directory to write to, no locks there, or no numba.
        yield
        return
    try:
        yield
    finally:
        lock.release()


def cache_root() -> Path:
    """Directory of compiled code. Raises ImportError without numba."""
    from numba import config

    return Path(config.CACHE_DIR or os.path.join(envs.VLLM_CACHE_ROOT, "host_loops"))


def cache_folder(file: Path) -> Path:
    """The directory of what this version of numba, with its flags, compiles from this version of a file.

    numba itself keeps all versions under one name. It writes its index before the code that the index names; a process
    that starts between the two, after an update, would load the code of the version before. And it goes by a file's
    time, too: a file that is only newer has a directory of its own.

    Raises OSError where the file cannot be read.
    """
    import numba

    time, checks = file.stat().st_mtime_ns, numba.config.BOUNDSCHECK
    version = hashlib.sha256(f"{numba.__version__} {checks} {time}\0".encode() + file.read_bytes())
    return cache_root() / version.hexdigest()[:16]


def put_ints(values: Collection[int], into: np.ndarray) -> None:
    """Writes Python's integers to the front of an array, which takes a third of the time that an assignment does."""
    struct.pack_into(f"{len(values)}{into.dtype.char}", into.data, 0, *values)


def int_array(values: Collection[int]) -> np.ndarray:
    """[len(values)] int64"""
    array = np.empty(len(values), np.int64)
    put_ints(values, array)
    return array
