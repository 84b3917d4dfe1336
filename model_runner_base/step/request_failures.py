"""Requests that failed while a step was prepared, and are left out of steps until the scheduler ends them.

An error before any of the request's data is on the device ends only that request: its row is given back, and the
device's state is intact. An error in a graph, in the sampler or in a custom logits processor is raised instead, since
the rows of the whole batch have moved on. An error that other ranks may not have is raised, too: lack of memory, or a
missing file.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from vllm.logger import init_logger
from vllm.multimodal.inputs import MultiModalFeatureSpec

logger = init_logger(f"vllm.{__name__}")

T = TypeVar("T")


class RequestErrors:
    """Failed requests that steps may still name."""

    def __init__(self, num_ranks: int = 1) -> None:
        # Files may be missing on one rank's host alone; the others would run the request.
        self._of_the_host = (torch.OutOfMemoryError, OSError) if num_ranks > 1 else (torch.OutOfMemoryError,)
        self._failed: dict[str, Sequence[MultiModalFeatureSpec]] = {}
        """Images and other items in each failed request's prompt, by request."""
        self._untold: dict[str, str | None] = {}

    def __bool__(self) -> bool:
        return bool(self._failed)

    @contextmanager
    def of(self, req_id: str, items: Sequence[MultiModalFeatureSpec]) -> Iterator[None]:
        """Records an error inside the block as that request's failure; ``items`` are the images and other items of its
        prompt."""
        try:
            yield
        except self._of_the_host:
            raise
        except Exception as error:
            logger.exception("Request %s cannot be run.", req_id)
            self._failed[req_id] = items
            self._untold[req_id] = f"{type(error).__name__}: {error}"

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._failed

    def forget(self, req_ids: Collection[str]) -> None:
        """Forgets requests that the scheduler has ended."""
        for req_id in self._failed.keys() & set(req_ids):
            del self._failed[req_id]

    def without(self, by_request: Mapping[str, T]) -> dict[str, T]:
        """A copy of ``by_request`` without the failed requests."""
        return {req_id: value for req_id, value in by_request.items() if req_id not in self._failed}

    def items_of(self, by_request: Mapping[str, Sequence[int]]) -> list[MultiModalFeatureSpec]:
        """Items of failed requests whose indices are in ``by_request``."""
        return [items[index] for req_id, items in self._failed.items() for index in by_request.get(req_id, ())]

    def take(self) -> dict[str, str | None]:
        """Returns the errors by request that the scheduler was not told of yet, and clears them."""
        untold, self._untold = self._untold, {}
        return untold
