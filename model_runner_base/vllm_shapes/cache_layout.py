"""The layouts of KV caches that backends name to vLLM, where it asks for them."""

from typing import Any


def layouts_of_pages() -> tuple[Any, ...]:
    """What a backend tells vLLM if a layer's cache is [blocks, tokens, heads, size], apart from other layers'."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return (KVCacheLayout.LBNHC,)
