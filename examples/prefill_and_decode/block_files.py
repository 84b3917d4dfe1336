"""KV connector over files: one engine writes the cache blocks of prompts, and another one reads them.

A prefill engine has the role ``kv_producer``, a decode engine ``kv_consumer``; with ``kv_both`` an engine finds what it
has written before. All engines of a ``directory`` are alike: they have the same model, settings and device. A file has
a block of all layers of one rank. Its name is a digest of the prompt's tokens up to the block's end. Requests with
images, adapters, embeddings or a salt are left out, since their blocks do not depend on tokens alone.
"""

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

Block = tuple[str, int]
"""Name of a block's files, and the block's id."""
HALF = ".half"
"""End of the name of a file that is being written."""


@dataclass
class Work(KVConnectorMetadata):
    """Blocks to read before a step, and to write after it, by request."""

    loads: dict[str, list[Block]] = field(default_factory=dict)
    saves: dict[str, list[Block]] = field(default_factory=dict)


class BlockFiles(KVConnectorBase_V1):
    """Writes each prompt's full blocks when all of them are computed, and reads them between two steps."""

    moves_whole_blocks = True
    loads_between_steps = True
    requires_kv_delivery = False
    """A block that was not written is computed by the engine that reads."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, model, cache = vllm_config.kv_transfer_config, vllm_config.model_config, vllm_config.cache_config
        self._directory = Path(transfer.kv_connector_extra_config["directory"])
        self._directory.mkdir(parents=True, exist_ok=True)
        self._reads, self._writes = transfer.is_kv_consumer, transfer.is_kv_producer
        if self._writes:
            self._remove_halves()
        self._size = cache.block_size
        self._rank, self._num_ranks = vllm_config.parallel_config.rank, vllm_config.parallel_config.world_size
        self._alike = repr((model.model, str(model.dtype), cache.cache_dtype, self._size, self._num_ranks))
        # The scheduler's half.
        self._names: dict[str, list[str]] = {}
        """Names of a prompt's blocks by request, until it ends."""
        self._first: dict[str, int] = {}
        """Place in a prompt of the first block that can be read, by request."""
        self._has_read: set[str] = set()
        """Requests whose blocks were read, or could not be: they read no others, or a broken file would be read for
        ever."""
        self._to_write: dict[str, tuple[int, list[int]]] = {}
        """Length of a prompt and ids of its blocks by request, until they are written."""
        self._loads: dict[str, list[Block]] = {}
        # The worker's half.
        self._caches: dict[str, Any] = {}
        self._read: set[str] = set()
        self._not_read: set[int] = set()

    def _path(self, name: str, rank: int) -> Path:
        return self._directory / f"{name}.{rank}"

    def _remove_halves(self) -> None:
        """Removes what engines have left that were killed while they wrote; a write takes less than a minute."""
        for half in self._directory.glob(f"*{HALF}"):
            with suppress(FileNotFoundError):  # Another engine may rename or remove it.
                if half.stat().st_mtime < time.time() - 60:
                    half.unlink()

    # ---- The scheduler's half ----

    def _names_of(self, request: Any) -> list[str]:
        """Names of a prompt's full blocks. The last token is always computed, so a block that it ends is left out."""
        token_ids, others = request.prompt_token_ids, (request.mm_features, request.lora_request, request.cache_salt)
        if token_ids is None or any(others):
            return []
        digest, names = hashlib.sha256(self._alike.encode()), []
        for end in range(self._size, len(token_ids), self._size):
            digest.update(repr(token_ids[end - self._size : end]).encode())
            names.append(digest.hexdigest())
        return names

    def _is_written(self, name: str) -> bool:
        return all(self._path(name, rank).exists() for rank in range(self._num_ranks))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        names = self._names[request.request_id] = self._names_of(request)
        first = last = self._first[request.request_id] = num_computed_tokens // self._size
        reads = self._reads and request.request_id not in self._has_read
        while reads and last < len(names) and self._is_written(names[last]):
            last += 1
        return (last - first) * self._size, last > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._has_read.add(request.request_id)
            first = self._first[request.request_id]
            last = first + num_external_tokens // self._size
            names, (block_ids,) = self._names[request.request_id], blocks.get_block_ids()
            self._loads[request.request_id] = [*zip(names[first:last], block_ids[first:last], strict=True)]

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        work, self._loads = Work(self._loads), {}
        cached, computed = scheduler_output.scheduled_cached_reqs, {}
        for new in scheduler_output.scheduled_new_reqs if self._writes else ():
            if self._names.get(new.req_id):
                self._to_write[new.req_id] = len(new.prompt_token_ids), [*new.block_ids[0]]
                computed[new.req_id] = new.num_computed_tokens
        for req_id, before, new_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if req_id in self._to_write:
                _, block_ids = self._to_write[req_id]
                if req_id in cached.resumed_req_ids:
                    block_ids.clear()
                block_ids += new_ids[0] if new_ids else ()
                computed[req_id] = before
        for req_id, before in computed.items():
            length, block_ids = self._to_write[req_id]
            if before + scheduler_output.num_scheduled_tokens[req_id] >= length:
                work.saves[req_id] = [*zip(self._names[req_id], block_ids, strict=False)]
                del self._to_write[req_id]
        for req_id in scheduler_output.finished_req_ids:
            for kept in (self._names, self._first, self._to_write):
                kept.pop(req_id, None)
            self._has_read.discard(req_id)
        return work

    # ---- The worker's half ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def handle_preemptions(self, preempted: Any) -> None:
        """Does nothing: blocks are written in the step that computes them."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Reads the blocks of each request up to the first that cannot be read."""
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        for req_id, blocks in work.loads.items():
            for place, (name, block) in enumerate(blocks):
                try:
                    rows = torch.load(self._path(name, self._rank), weights_only=True)
                except Exception:
                    self._not_read.update(block for _, block in blocks[place:])
                    break
                for layer, cache in self._caches.items():
                    cache[block] = rows[layer].to(cache.device)
            self._read.add(req_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: blocks are read when the step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are written when the step ends."""

    def wait_for_save(self) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        for name, block in {pair for blocks in work.saves.values() for pair in blocks}:
            path = self._path(name, self._rank)
            half = path.with_name(f"{uuid4().hex}{HALF}")
            torch.save({layer: cache[block].to("cpu", copy=True) for layer, cache in self._caches.items()}, half)
            half.replace(path)  # A reader finds a whole file or none.

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        read, self._read = self._read, set()
        return None, read or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        not_read, self._not_read = self._not_read, set()
        return not_read
