"""Free memory for towers of vLLM that ask torch's accelerator for it, where torch has none.

Gemma 4's tower encodes as many images at a time as fit into free memory. On the host, torch has no accelerator to ask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch


@contextmanager
def memory_of_host() -> Iterator[None]:
    """Context in which the accelerator's free and total memory is the host's, if torch has no accelerator."""
    accelerator: Any = torch.accelerator
    if accelerator.is_available() or not hasattr(accelerator, "get_memory_info"):
        yield
        return
    own = accelerator.get_memory_info
    accelerator.get_memory_info = lambda device=None: _memory()
    try:
        yield
    finally:
        accelerator.get_memory_info = own


def _memory() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total
