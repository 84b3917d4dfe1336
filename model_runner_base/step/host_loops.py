"""Compilation, by numba, of the host's loops over tokens, tiles and pairs that every step needs.

As array expressions these loops would be some fifty NumPy calls a step, each over a few hundred numbers, and most of
the time would go into the calls. Without numba, or with numba's ``NUMBA_DISABLE_JIT=1``, the same functions run as
plain Python: slower, with the same results.

Compiled code is kept on disk, under ``NUMBA_CACHE_DIR`` or else ``VLLM_CACHE_ROOT``. It is used again as long as the
loop's file and those of the loops that it calls stay the same, so a loop must read no value that another file defines.
Code of older versions is not deleted. If the directory cannot be written, every start compiles anew. Code is compiled
for types of arguments, so arguments must keep theirs: int64 for numbers that describe a batch, int32 for numbers that
are sent to the device.
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
    """Returns the function so that it is compiled when it is first called with arguments of new types."""
    try:
        from numba import config, njit
    except ImportError:
        return function
    if config.DISABLE_JIT:
        return function
    try:
        folder = cache_folder(*files_of(function))
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # There is no file that tells versions apart, or no directory that can be written.
        return njit(function)
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)  # numba reads it while it wraps the function.
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # NUMBA_CACHE_LOCATOR_CLASSES names other places, and none of them works.
        return njit(function)
    finally:
        config.CACHE_DIR = before


@contextmanager
def compiling() -> Iterator[None]:
    """Lets one process at a time compile and keep loops.

    Two processes that keep code of two signatures of one loop at the same time may give both the same name.
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


def files_of(function: Callable[..., Any]) -> list[Path]:
    """Files whose code numba compiles for a loop: its own, and those of the loops that it calls."""
    files = {Path(function.__code__.co_filename)}
    for name in function.__code__.co_names:
        if called := getattr(function.__globals__.get(name), "py_func", None):
            files.update(files_of(called))
    return sorted(files)


def cache_folder(*files: Path) -> Path:
    """Directory of the code that this version of numba, with its flags, compiles from these versions of files.

    numba itself keeps all versions under one name, and writes its index before the code that the index names. A process
    that starts between the two writes, after an update, would load code of the old version. numba also compares a
    file's time, so a file that is only newer has a directory of its own, too.

    Raises OSError where a file cannot be read.
    """
    import numba

    version = hashlib.sha256(f"{numba.__version__} {numba.config.BOUNDSCHECK}".encode())
    for file in files:
        version.update(f" {file.stat().st_mtime_ns}\0".encode() + file.read_bytes())
    return cache_root() / version.hexdigest()[:16]


def put_ints(values: Collection[int], into: np.ndarray) -> None:
    """Writes Python integers to the front of an array, in a third of the time that an assignment takes."""
    struct.pack_into(f"{len(values)}{into.dtype.char}", into.data, 0, *values)


def int_array(values: Collection[int]) -> np.ndarray:
    """[len(values)] int64 array of Python integers."""
    array = np.empty(len(values), np.int64)
    put_ints(values, array)
    return array
