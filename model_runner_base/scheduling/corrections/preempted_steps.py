"""Requests that are preempted in the step in which they were scheduled: nothing of that step stays in the caches.

With the priority policy vLLM may take a request out of a step that it is still scheduling, in favour of a later one in
the running order. It takes back the request's tokens, but not what it has noted for others: full blocks of those tokens
are in the prefix cache, and an image to be encoded counts as encoded. A request that found one of them would read keys
that no step has written, or an image that no step has encoded.
"""

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from model_runner_base.scheduling.step_hooks import StepHooks


class PreemptedSteps(StepHooks):
    """Mixin that takes back what a preempted request has left in the caches, listed before vLLM's scheduler."""

    forgets_preempted_steps = True
    """Whether images go with the priority policy; ``admission/multimodal_limits.py`` looks for this attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._promised: set[str] = set()
        """Identifiers of the items that this step has promised to encode."""
        # Whisper shares no item, and a connector brings items that no step encodes.
        if self.policy == SchedulingPolicy.PRIORITY and not self.is_encoder_decoder and self.ec_connector is None:
            allocate = self.encoder_cache_manager.allocate

            def promise(request: Request, input_id: int) -> None:
                allocate(request, input_id)
                if not self._promised:
                    self.after_schedule.append(self._keep_promises)
                self._promised.add(request.mm_features[input_id].identifier)

            self.encoder_cache_manager.allocate = promise  # type: ignore[method-assign]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            blocks = manager.req_to_blocks.get(request.request_id, ())
            unwritten = blocks[request.num_computed_tokens // manager.block_size :]
            manager.block_pool.evict_blocks({block.block_id for block in unwritten})
        super()._preempt_request(request, *args, **kwargs)

    def _keep_promises(self, step: SchedulerOutput) -> None:
        """Gives each item that the step no longer encodes to another request that needs it, or forgets it."""
        encoded = {
            self.requests[req_id].mm_features[input_id].identifier
            for req_id, input_ids in step.scheduled_encoder_inputs.items()
            for input_id in input_ids
        }
        for identifier in self._promised - encoded:
            user, input_id = next(self._uses(step, identifier), (None, 0))
            if user is None:
                self._forget_item(identifier)
            else:
                step.scheduled_encoder_inputs.setdefault(user, []).append(input_id)
        self._promised.clear()

    def _uses(self, step: SchedulerOutput, identifier: str) -> Iterator[tuple[str, int]]:
        """Yields the requests that read or hold an item in a step, and its index among the items of each."""
        holders = self.encoder_cache_manager.cached.get(identifier, ())
        for req_id, count in step.num_scheduled_tokens.items():
            end = self.requests[req_id].num_computed_tokens
            for input_id, item in enumerate(self.requests[req_id].mm_features):
                first = item.mm_position.offset
                is_read = first <= end and first + item.mm_position.length > end - count  # Drafters read one ahead.
                if item.identifier == identifier and (is_read or req_id in holders):
                    yield req_id, input_id

    def _forget_item(self, identifier: str) -> None:
        manager: Any = self.encoder_cache_manager
        if identifier in manager.freeable:
            manager.num_free_slots += manager.freeable.pop(identifier)
            del manager.cached[identifier]
            getattr(manager, "num_embeds_by_hash", {}).pop(identifier, None)
