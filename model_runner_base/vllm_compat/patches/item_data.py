"""What an image is made of comes to the runner, though its tokens are cached.

Later releases of vLLM leave out the data of items that lie in a cached prefix, and send it to nobody who resumes: a
request that is preempted when its blocks and its encoder outputs have been given up could not encode them again.
"""

from typing import Any

from vllm.v1.core.sched import output


def keep_item_data() -> None:
    """To be called in the process that schedules."""
    if hasattr(output, "strip_covered_mm_data"):
        output.strip_covered_mm_data = _as_they_are


def _as_they_are(mm_features: list[Any], *_: Any, **__: Any) -> list[Any]:
    return mm_features
