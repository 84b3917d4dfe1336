"""Refuses images, videos and sounds that cannot be used, and forgets the items of refused requests.

Embeddings are checked where vLLM parses them. vLLM divides their rows by a grid, makes a prompt of as many tokens as
the grid says, and drops the remaining rows.

The front end's cache notes an item when it is processed, and from then on sends the engine only the item's hash. The
engine never had the items of a refused request, so the cache must forget them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.parse import DictEmbeddingItems, MultiModalDataParser
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.v1.engine.input_processor import InputProcessor

from model_runner_base.errors import RequestError

_processed = threading.local()
"""``items``: for each call under way in this thread, a list of (cache, hash) of the items that it has processed."""
MARK = "_forgets_refused_items"


def forget_refused_items(
    check_fields: Callable[[Any, str], None], check_shares: Callable[[Any, str, Any], None]
) -> None:
    """Patches vLLM's front end. Call it in its process; further calls change nothing.

    Args:
        check_fields: takes the data and the modality of embeddings; raises if they must not be divided.
        check_shares: takes the data, the modality and vLLM's fields of embeddings; raises if they are divided wrongly.
    """
    if hasattr(InputProcessor, MARK):
        return
    setattr(InputProcessor, MARK, True)
    for cls, name, wrapper in (
        (InputProcessor, "process_inputs", _forgetting_request),
        (InputProcessor, "_validate_mm_uuids", _reading),  # Some releases read the items before they parse them.
        (MultiModalDataParser, "parse_mm_data", _reading),
        (BaseMultiModalProcessor, "apply", _reading),
        *((cache, "get_and_update_item", _noting) for cache in BaseMultiModalProcessorCache.__subclasses__()),
    ):
        if hasattr(cls, name):
            setattr(cls, name, wrapper(getattr(cls, name)))

    parse = DictEmbeddingItems.__init__

    @wraps(parse)
    def checked(self: Any, data: Any, modality: str, *args: Any, **kwargs: Any) -> None:
        check_fields(data, modality)
        parse(self, data, modality, *args, **kwargs)
        check_shares(data, modality, self.fields_config)

    DictEmbeddingItems.__init__ = checked  # type: ignore[method-assign]


def forget_items(input_processor: Any, prompt: Any) -> None:
    """Forgets the items of a request that was processed, so that the front end sends them whole next time.

    An engine that has an item keeps it.
    """
    owner = input_processor if hasattr(input_processor, "mm_processor_cache") else input_processor.renderer
    _drop((owner.mm_processor_cache, each) for each in _hashes_of(prompt))


def _hashes_of(prompt: Any) -> list[str]:
    if not isinstance(prompt, dict):
        return [item.mm_hash or item.identifier for item in getattr(prompt, "mm_features", None) or ()]
    parts = [prompt, *(part for part in prompt.values() if isinstance(part, dict))]
    return [each for part in parts for hashes in part.get("mm_hashes", {}).values() for each in hashes]


def _drop(items: Iterable[tuple[Any, str]]) -> None:
    for cache, each in items:
        # A cache in shared memory holds the items themselves, and the engine reads them from there.
        if hasattr(cache, "_cache"):
            cache._cache.pop(each, None)


@contextmanager
def _forgetting() -> Iterator[None]:
    """Context whose processed items are forgotten if it ends with an error."""
    stack = _processed.__dict__.setdefault("items", [])
    items: list[tuple[Any, str]] = []
    stack.append(items)
    try:
        yield
    except Exception:
        _drop(items)
        raise
    finally:
        stack.pop()


def _noting(get_and_update_item: Any) -> Any:
    @wraps(get_and_update_item)
    def noting(self: Any, mm_item: Any, mm_hash: str) -> Any:
        for items in _processed.__dict__.get("items", ()):
            items.append((self, mm_hash))
        return get_and_update_item(self, mm_item, mm_hash)

    return noting


def _forgetting_request(process_inputs: Any) -> Any:
    @wraps(process_inputs)
    def forgetting(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with _forgetting():
                return process_inputs(self, request_id, prompt, *args, **kwargs)
        except Exception:
            forget_items(self, prompt)
            raise

    return forgetting


def _reading(method: Any) -> Any:
    """Makes ``method`` raise RequestError (status 400 from a server) if the model's processor cannot read items."""

    @wraps(method)
    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with _forgetting():
                return method(self, *args, **kwargs)
        except (ValueError, MemoryError):
            raise
        except Exception as error:
            raise RequestError(f"these images, videos or sounds cannot be read: {error!r}") from error

    return reading
