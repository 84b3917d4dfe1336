"""KV connector for checks: full blocks of prompts, in a dictionary of the process that both of its halves read."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

Key = tuple[int, ...]
"""Tokens of a prompt up to the end of a block."""


def transfer_config(failure_policy: str = "recompute") -> dict[str, str]:
    """Options of ``kv_transfer_config`` that name the connector."""
    return {
        "kv_connector": KeptBlocks.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": failure_policy,
    }


@dataclass
class Work(KVConnectorMetadata):
    """Blocks to load before a step, and to save after it, by request."""

    loads: dict[str, list[tuple[Key, int]]] = field(default_factory=dict)
    saves: dict[str, list[tuple[Key, int]]] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    """Requests whose first block is not there when it is loaded."""


@dataclass
class Seen:
    """A request that the scheduler's half has seen in a step, and whose prompt is not saved yet."""

    prompt: list[int]
    block_ids: list[int]


class KeptBlocks(KVConnectorBase_V1):
    """Saves each prompt when all of its full blocks are computed, and loads it inside of a step or between steps."""

    moves_whole_blocks = True
    kept: ClassVar[dict[Key, dict[str, torch.Tensor]]] = {}
    between_steps: ClassVar[bool] = False
    num_failing: ClassVar[int] = 0
    """Number of further loads that fail, and leave something else in their block."""
    fails_again: ClassVar[bool] = False
    """Whether the first load fails of each request that comes back after a preemption."""
    calls: ClassVar[Counter[str]] = Counter()

    @classmethod
    def forget(cls) -> None:
        cls.kept.clear()
        cls.calls.clear()
        cls.between_steps, cls.num_failing, cls.fails_again = False, 0, False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._seen: dict[str, Seen] = {}
        self._work = Work()
        self._has_failed: set[str] = set()
        self._first: dict[str, int] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._invalid: set[int] = set()
        self._spoilt: set[str] = set()
        """Requests of this step with a block that was not loaded: what follows it is wrong, too."""
        self._loaded: set[str] = set()

    # ---- The scheduler's half ----

    def _keys(self, prompt: list[int]) -> Iterator[Key]:
        """Keys of all blocks but one that holds the last token, which is always computed."""
        for end in range(self._size, len(prompt), self._size):
            yield tuple(prompt[:end])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count = 0
        for key in self._keys(request.prompt_token_ids):
            if key not in self.kept:
                break
            count += 1
        first = self._first[request.request_id] = num_computed_tokens // self._size
        found = max(0, count - first) * self._size
        return found, bool(found) and self.between_steps

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._first[request.request_id]
            last = first + num_external_tokens // self._size
            keys = list(self._keys(request.prompt_token_ids))[first:last]
            self._work.loads[request.request_id] = list(zip(keys, blocks.get_block_ids()[0][first:last], strict=True))
            if self.fails_again and request.num_preemptions and request.request_id not in self._has_failed:
                self._has_failed.add(request.request_id)
                self._work.failing.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        work, self._work = self._work, Work()
        cached, counts = scheduler_output.scheduled_cached_reqs, scheduler_output.num_scheduled_tokens
        for req_id in scheduler_output.finished_req_ids:
            self._seen.pop(req_id, None)
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            self._seen[new.req_id] = Seen(new.prompt_token_ids, [*new.block_ids[0]])
            computed[new.req_id] = new.num_computed_tokens
        for req_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in self._seen:
                known = [] if req_id in cached.resumed_req_ids else self._seen[req_id].block_ids
                self._seen[req_id].block_ids = [*known, *(new_ids[0] if new_ids else ())]
        for req_id, before in computed.items():
            seen = self._seen.get(req_id)
            if seen is not None and before + counts[req_id] >= len(seen.prompt):
                work.saves[req_id] = list(zip(self._keys(seen.prompt), seen.block_ids, strict=False))
                del self._seen[req_id]
        return work

    # ---- The worker's half ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def handle_preemptions(self, preempted: Any) -> None:
        """Does nothing: blocks are saved when they are computed."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Work)
        self._spoilt.clear()
        for req_id, blocks in metadata.loads.items():
            for place, (key, block) in enumerate(blocks):
                is_counted = type(self).num_failing > 0
                type(self).num_failing -= is_counted
                fails = is_counted or (place == 0 and req_id in metadata.failing)
                self.calls["failed" if fails else "loaded"] += 1
                if fails:
                    self._invalid.add(block)
                    self._spoilt.add(req_id)
                for name, cache in self._caches.items():
                    cache[block] = torch.nan if fails else self.kept[key][name]
            if self.between_steps:
                self._loaded.add(req_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls[f"before {layer_name}"] += 1

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self.calls[f"after {layer_name}"] += 1

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Work)
        for req_id, blocks in metadata.saves.items():
            if req_id in self._spoilt:
                continue
            for key, block in blocks:
                self.calls["saved"] += 1
                self.kept[key] = {name: cache[block].clone() for name, cache in self._caches.items()}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.calls["steps"] += 1
        loaded, self._loaded = self._loaded, set()
        return None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def shutdown(self) -> None:
        self.calls["shutdown"] += 1


class Undeclared(KeptBlocks):
    """A connector whose class does not say what it moves."""

    moves_whole_blocks = False
