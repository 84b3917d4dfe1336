"""KV connector for tests of schedulers: its scheduler's half notes each call, and answers by the requests' names."""

from collections import Counter
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from scheduler_state import told
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


@dataclass
class NotedStep(KVConnectorMetadata):
    """Metadata of a step: its number."""

    number: int


class NotedStats(KVConnectorStats):
    """Statistics that are a sum."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return NotedStats({"sum": self.data.get("sum", 0) + other.data.get("sum", 0)})

    def is_empty(self) -> bool:
        return not self.data


class NotingConnector(KVConnectorBase_V1, SupportsHMA):
    """Notes the calls of its scheduler's half, with the state of the requests at that time.

    Options: ``loads``, whether requests have blocks elsewhere; ``delays``, whether it keeps the blocks of some requests
    that have ended; ``writes``, whether it sometimes writes to requests that run.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._size = vllm_config.cache_config.block_size
        self._draws: Counter[str] = Counter()
        self._requests: dict[str, Any] = {}
        self._inside: dict[str, list[int]] = {}
        self._found: dict[str, tuple[int, bool]] = {}
        self._step = 0
        self.calls: list[tuple[Any, ...]] = []
        self.loading: dict[str, list[int]] = {}
        """Blocks by request that are loaded between steps."""
        self.loaded_inside: dict[str, list[int]] = {}
        """Blocks by request that are loaded inside of the last step."""
        self.sending: set[str] = set()
        """Requests that have ended and keep their blocks."""

    def _draw(self, name: str, count: int) -> int:
        """The next of a name's numbers below ``count``, which are the same for each connector."""
        self._draws[name] += 1
        return crc32(f"{name} {self._draws[name]}".encode()) // 7 % count

    # ---- A request arrives ----

    def on_new_request(self, request: Any) -> None:
        self.calls.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        req_id = request.request_id
        self._requests[req_id] = request
        found: tuple[int | None, bool] = (0, False)
        if self._options.get("loads"):
            rest = request.num_tokens - num_computed_tokens
            blocks, kind = (rest - 1) // self._size, self._draw(req_id, 6)
            if kind == 0:
                found = None, False
            elif kind in (1, 2) and blocks:
                found = (1 + self._draw(req_id, blocks)) * self._size, kind == 2
            elif kind == 3:
                found = rest, True
        self._found[req_id] = num_computed_tokens, found[1]
        self.calls.append(("matched", req_id, request.num_tokens, num_computed_tokens, found))
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        req_id, (block_ids, *_) = request.request_id, blocks.get_block_ids()
        self.calls.append(("allocated", req_id, list(block_ids), num_external_tokens))
        if num_external_tokens:
            start, is_between = self._found[req_id]
            first, last = start // self._size, -(-(start + num_external_tokens) // self._size)
            (self.loading if is_between else self._inside)[req_id] = list(block_ids[first:last])

    # ---- A step ----

    def build_connector_meta(self, scheduler_output: Any) -> NotedStep:
        self._step += 1
        self.loaded_inside, self._inside = self._inside, {}
        seen = told(scheduler_output)
        seen.pop("kv_connector_block_state", None)
        state = getattr(scheduler_output, "kv_connector_block_state", None)
        if state is not None:
            tables = {req_id: state.get_block_ids(req_id) for req_id in sorted(state.req_ids)}
            seen["blocks"] = [{req_id: [list(ids) for ids in groups] for req_id, groups in tables.items()}]
            seen["blocks"].append(state.boundary_state_offloads)
        seen["order"] = list(scheduler_output.num_scheduled_tokens)
        self.calls.append(("step", self._step, seen))
        if self._draw("look", 3) == 0:
            self.calls.append(("looked", {req_id: _progress(each) for req_id, each in self._requests.items()}))
        if self._options.get("writes"):
            for req_id in scheduler_output.num_scheduled_tokens:
                if req_id in self._requests and self._draw(req_id, 9) == 0:
                    request = self._requests[req_id]
                    request.num_computed_tokens = request.num_computed_tokens
        return NotedStep(self._step)

    def update_connector_output(self, connector_output: Any) -> None:
        self.calls.append(("output", vars(connector_output).copy()))
        for req_id in connector_output.finished_recving or ():
            del self.loading[req_id]
        self.sending -= connector_output.finished_sending or set()

    def get_kv_connector_stats(self) -> KVConnectorStats:
        self.calls.append(("stats",))
        return NotedStats({"sum": 1} if self._draw("stats", 2) else {})

    def take_events(self) -> list[Any]:
        self.calls.append(("events",))
        return [self._step] if self._draw("events", 2) else []

    # ---- A request ends ----

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        req_id = request.request_id
        self._requests.pop(req_id, None)
        is_delayed = bool(self._options.get("delays")) and req_id not in self.loading and self._draw(req_id, 2) == 0
        self.sending |= {req_id} if is_delayed else set()
        tables = [list(ids) for ids in block_ids]
        self.calls.append(("finished", req_id, request.status, _progress(request), tables, is_delayed))
        return is_delayed, {"delayed": is_delayed} if self._draw(req_id, 2) else None

    def reset_cache(self) -> bool:
        self.calls.append(("reset",))
        return True

    # ---- The worker's half does nothing ----

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class QuietConnector(NotingConnector):
    """A connector without figures and events, which vLLM's scheduler need not ask in each step."""

    get_kv_connector_stats = KVConnectorBase_V1.get_kv_connector_stats  # type: ignore[assignment]
    take_events = KVConnectorBase_V1.take_events  # type: ignore[assignment]


def _progress(request: Any) -> tuple[Any, ...]:
    names = ("num_computed_tokens", "num_tokens", "num_output_placeholders", "num_in_flight_tokens", "last_sched_seq")
    return *(getattr(request, name, None) for name in names), len(request.block_hashes), request.is_prefill_chunk
