"""Two schedulers in lockstep that have a KV connector each: its calls are the same, too."""

from collections import deque
from typing import Any

from noting_connector import NotedStats
from scheduler_pair import Habits, Pair
from scheduler_setting import AsyncCorrected, Setting, SyncCorrected
from scheduler_state import ids, same
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

HAS_FAILED_REQUESTS = "failed_recving" in KVConnectorOutput.__dataclass_fields__


class ConnectedPair(Pair):
    """A pair whose schedulers have a ``NotingConnector``, with the outputs of a worker's half."""

    def __init__(self, setting: Setting, habits: Habits, seed: int, ours: type[Scheduler] | None = None) -> None:
        super().__init__(setting, habits, seed, ours, AsyncCorrected if setting.is_async else SyncCorrected)
        self.transfers: deque[dict[str, Any] | None] = deque()
        """Fields of the connector's output of each step in flight."""
        self.reported: set[str] = set()
        """Requests whose transfer is over in a step in flight."""
        self.counts = dict.fromkeys(("loaded", "sent", "failed"), 0)
        for scheduler in self.both:
            publish = scheduler.connector.calls.append
            scheduler.kv_event_publisher.publish = lambda batch, publish=publish: publish(("published", batch.events))

    def _tokens(self, output: SchedulerOutput) -> dict[str, list[int]]:
        tokens = super()._tokens(output)
        self.transfers.append(self._transfer())
        self._compare_calls()
        return tokens

    def _transfer(self) -> dict[str, Any] | None:
        """Fields of the connector's output of the step that has been scheduled; None: it has none."""
        draw, connector = self.random, self.stock.connector
        loaded = {req_id for req_id in sorted(connector.loading.keys() - self.reported) if draw.random() < 0.3}
        sent = {req_id for req_id in sorted(connector.sending - self.reported) if draw.random() < 0.3}
        self.reported |= loaded | sent
        fields: dict[str, Any] = {"finished_recving": loaded, "finished_sending": sent}
        failing = sorted(req_id for req_id in loaded if draw.random() < 0.3)
        lost = [connector.loading[req_id] for req_id in failing]
        if HAS_FAILED_REQUESTS and draw.random() < 0.3:
            fields["failed_recving"], lost = set(failing), []
        # After a load inside of a step fails, vLLM goes on with a step in flight only if the request fails with it.
        if not self.setting.is_async or self.setting.load_failures == "fail":
            inside = sorted(connector.loaded_inside.items())
            lost += [block_ids for _, block_ids in inside if draw.random() < 0.2]
        if "loads" in self.setting.connector and not self.setting.is_async and draw.random() < 0.05:
            # Blocks of a request that runs, which were loaded long before.
            running = [request.request_id for request in self.stock.running]
            lost += [self.stock.kv_cache_manager.get_block_ids(draw.choice(running))[0]] if running else []
        invalid = {block_id for block_ids in lost for block_id in block_ids if draw.random() < 0.5}
        fields["invalid_block_ids"] = invalid
        for name, found in (("loaded", loaded), ("sent", sent), ("failed", invalid)):
            self.counts[name] += len(found)
        has_stats = draw.random() < 0.3
        if not has_stats and not any(fields.values()) and draw.random() < 0.7:
            return None
        return fields | {"kv_connector_stats": NotedStats({"sum": 2}) if has_stats else None}

    def _update(self) -> None:
        self.now = self.transfers.popleft()
        try:
            super()._update()
        finally:
            for req_id in self.reported & {*self._reported_now()}:
                self.reported.discard(req_id)
        self._compare_calls()

    def _reported_now(self) -> set[str]:
        return self.now["finished_recving"] | self.now["finished_sending"] if self.now else set()

    def _answer(self, req_ids: list[str], tokens: dict[str, list[int]]) -> ModelRunnerOutput:
        output = super()._answer(req_ids, tokens)
        if self.now is not None:
            copied = {name: set(value) if isinstance(value, set) else value for name, value in self.now.items()}
            output.kv_connector_output = KVConnectorOutput(**copied)
        return output

    def _compare_calls(self) -> None:
        stock, ours = (scheduler.connector.calls for scheduler in self.both)
        assert [call[:2] for call in stock] == [call[:2] for call in ours], "calls"
        for expected, found in zip(stock, ours, strict=True):
            for theirs, mine in zip(expected, found, strict=True):
                same(theirs, mine, f"call {expected[:2]}")
        stock.clear()
        ours.clear()

    def look(self) -> None:
        super().look()
        for what, look in LOOKS.items():
            same(*({what: look(scheduler)} for scheduler in self.both), "the scheduler")


LOOKS: dict[str, Any] = {
    "has requests": lambda scheduler: scheduler.has_requests(),
    "has finished requests": lambda scheduler: scheduler.has_finished_requests(),
    "loaded": lambda scheduler: scheduler.finished_recving_kv_req_ids,
    "failed": lambda scheduler: scheduler.failed_recving_kv_req_ids,
    "steps": lambda scheduler: [getattr(scheduler, name, 0) for name in ("sched_step_seq", "processed_step_seq")],
    "freed later": lambda scheduler: [(step, ids(blocks)) for step, blocks in getattr(scheduler, "deferred_frees", ())],
    "holding": lambda scheduler: [request.request_id for request in getattr(scheduler, "kv_holding_waiting", ())],
    "prefills": lambda scheduler: {request.request_id for request in getattr(scheduler, "_inflight_prefills", ())},
}
