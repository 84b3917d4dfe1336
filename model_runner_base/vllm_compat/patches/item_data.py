"""Keeps the data of images and other items in what the runner gets, even if their tokens are cached.

Later releases of vLLM leave out the data of items that lie in a cached prefix, and never send it to requests that
resume. Then a request that is preempted could not encode its items again, once its blocks and its encoder outputs have
been given up.
"""

from typing import Any

from vllm.v1.core.sched import output


def keep_item_data() -> None:
    """Patches vLLM's scheduler output. Call it in the process that schedules."""
    if hasattr(output, "strip_covered_mm_data"):
        output.strip_covered_mm_data = _as_they_are


def _as_they_are(mm_features: list[Any], *_: Any, **__: Any) -> list[Any]:
    return mm_features
