"""The C library's allocator, set up for XLA:CPU."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's mallopt."""


def keep_freed_memory() -> None:
    """Lets freed memory stay with the process, to be used again without page faults.

    XLA:CPU takes each run's temporaries from malloc and frees them after it. Large ones would be mapped and unmapped
    each time, and clearing their pages again took more than half of attention's time. To be called before XLA starts
    its threads: what a thread's own arena cannot hold is mapped in spite of the settings, so all threads share one
    arena. The settings hold for the whole process, until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # Else another C library, with rules of its own.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)  # Never.


def give_back_freed_memory() -> None:
    """Returns what was freed so far to the system, which counts it as used otherwise."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
