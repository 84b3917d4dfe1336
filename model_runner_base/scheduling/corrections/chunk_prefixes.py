"""Prefixes of layers whose attention is in chunks, such as those of Llama 4.

A prefix can serve such a layer if it has all blocks from the beginning of the chunk of the next token. vLLM looks for
these blocks at the longest length that other layers have. If one is missing, it takes the shorter length, which is in
an earlier chunk where a chunk's beginning lies within a block; and it has not looked for the blocks of that chunk.
"""

from functools import wraps
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager


class ChunkPrefixes(Scheduler):
    """Mixin that has vLLM look for the blocks of an earlier chunk, too; listed before vLLM's scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        look_in_earlier_chunks()
        super().__init__(*args, **kwargs)


def look_in_earlier_chunks() -> None:
    """Corrects vLLM's search for the prefixes of all schedulers in this process, once."""
    manager: Any = ChunkedLocalAttentionManager
    if not hasattr(manager.find_longest_cache_hit, "__wrapped__"):
        manager.find_longest_cache_hit = _in_earlier_chunks(manager.find_longest_cache_hit)


def _in_earlier_chunks(find: Any) -> classmethod:
    @wraps(find)
    def find_longest_cache_hit(cls: type, *, max_length: int, kv_cache_spec: Any, **kwargs: Any) -> Any:
        chunk, length = kv_cache_spec.attention_chunk_size, max_length
        while True:
            sought = length
            found = find.__func__(cls, max_length=sought, kv_cache_spec=kv_cache_spec, **kwargs)
            blocks = found if isinstance(found[0], list) else found[0]  # Newer releases return the length, too.
            length = len(blocks[0]) * kv_cache_spec.block_size
            if length // chunk == sought // chunk:
                return found

    return classmethod(find_longest_cache_hit)
