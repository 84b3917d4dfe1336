"""Scheduler steps in which each request in steady decode is a row of a few arrays (``scheduled_rows.py``).

A step hides the requests in rows from vLLM, lets vLLM's own code schedule the others, and puts both together. Rows are
the first of the running requests, so vLLM would have scheduled them first, too.

A KV connector reads each step before vLLM counts the step's tokens. There the rows join the step, so the connector
finds the whole step, and requests as they were before it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from model_runner_base.scheduling.releases import (
    DROPS_STALE_OUTPUTS,
    advance_grammar,
    common_prefix,
    count_read,
    failed_loads,
    has_ended_requests,
    holds_waiting,
    is_asked_each_step,
    is_paused,
    number_step,
    show_blocks,
    show_to_connector,
    take_preempted,
    waiting_requests,
)
from model_runner_base.scheduling.rows.outputs import Batch, RowEvents, merge, plain_outputs
from model_runner_base.scheduling.rows.row_request import RowRequest
from model_runner_base.scheduling.rows.scheduled_rows import BlockIds, ScheduledRows
from model_runner_base.scheduling.rows.support import unsupported_reason
from model_runner_base.scheduling.step_hooks import StepHooks, errors_of

logger = init_logger(__name__)

MAX_IN_FLIGHT = 16
"""Number of steps in flight that are remembered. vLLM's own code reads the outputs of older ones."""


class RowStep(NamedTuple):
    """Step in flight that has rows."""

    scheduler_output: SchedulerOutput
    batch: Batch
    others: dict[str, int]
    """Number of tokens of each request without a row."""


class RowSteps(StepHooks):
    """Mixin that schedules steps with rows, and leaves steps that rows cannot serve to vLLM.

    List it among a class's bases before ``Scheduler``, ``AsyncScheduler`` or a user's subclass of them. The subclass
    may override no method that rows take over (``support.py``). Corrections (``../corrections/``) come between the
    two. Rows do not need them.
    """

    least_rows = 4
    """Smallest number of running requests for which rows cost less than vLLM's own loops."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: ScheduledRows | None = None
        """Rows of requests in steady decode; None if vLLM's own code does everything."""
        self._steps: deque[RowStep] = deque(maxlen=MAX_IN_FLIGHT)
        self._is_async = isinstance(self, AsyncScheduler)
        self._join: Callable[[SchedulerOutput], None] | None = None
        """Adds the rows to the step that vLLM's own code is making; None once they have joined."""
        self._others: dict[str, int] | None = None
        """Number of tokens of each request without a row, once the rows have joined the step that is being made."""
        reason = unsupported_reason(self, RowSteps)
        if reason is not None:
            logger.info("Requests are scheduled by vLLM's own loops, because of %s.", reason)
            return
        manager = self.kv_cache_manager
        self._asks_connector = self.connector is not None and is_asked_each_step(self.connector)
        self._rows = ScheduledRows(manager, self.max_model_len, self._is_async)
        if self.connector is not None:
            build_meta = self.connector.build_connector_meta

            def build_for_all(step: SchedulerOutput) -> Any:
                self._join_rows(step)
                return build_meta(step)

            self.connector.build_connector_meta = build_for_all  # type: ignore[method-assign, assignment]

    # ---- A step is scheduled ----

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        rows = self._rows
        if rows is None:
            return super().schedule(*args, **kwargs)
        is_plain = len(self.running) >= self.least_rows and not any(args) and not any(kwargs.values())
        events = self._row_events(rows) if is_plain else None
        if events is None:
            if rows.requests or self._steps:
                rows.release_all()
                self._steps.clear()
            return super().schedule(*args, **kwargs)
        return self._schedule_rows(rows, events)

    def _row_events(self, rows: ScheduledRows) -> RowEvents | None:
        """Rows that have an event in this step, such as a new block; None if vLLM must schedule all requests."""
        if self._steps and not self._is_async:
            return None  # The output of the last step has not been read yet, and its tokens are this step's input.
        if is_paused(self) or (self.lora_config is not None and self._may_skip_adapters(self.lora_config.max_loras)):
            return None
        # The first contract sends all tokens of a request that the last step did not have.
        before = None if self.use_v2_model_runner else self.prev_step_scheduled_req_ids
        rows.update(self.running, before, [step.batch for step in self._steps])
        num_rows = len(rows.requests)
        events = rows.events() if num_rows else None
        if events is None:
            return None
        budget = self.max_num_scheduled_tokens - len(rows.batch().req_ids)
        num_free = self.kv_cache_manager.block_pool.get_num_free_blocks() - rows.num_growing * len(events.entering)
        if budget < 0 or num_free < 0:
            return None
        if self.policy == SchedulingPolicy.PRIORITY:
            # vLLM may preempt a request in a row to run another one.
            num_others = len(self.running) - num_rows
            if num_others and num_free < rows.num_growing * (budget // rows.block_size + num_others):
                return None
        return events

    def _may_skip_adapters(self, max_loras: int) -> bool:
        """Whether vLLM may skip a waiting request because the step already has ``max_loras`` other adapters.

        vLLM counts the adapters of all requests of a step, but sees none of those in rows.
        """
        waiting = waiting_requests(self)
        if not waiting:
            return False
        adapters = {each.lora_request.lora_int_id for each in chain(self.running, waiting) if each.lora_request}
        return len(adapters) > max_loras

    def _schedule_rows(self, rows: ScheduledRows, events: RowEvents) -> SchedulerOutput:
        batch, before = rows.batch(), self.prev_step_scheduled_req_ids
        num_rows, num_active = len(rows.requests), len(batch.req_ids)
        block_ids = rows.grow(events)
        self._join = partial(self._add_rows, rows, batch, events, block_ids)
        is_alone = len(self.running) == num_rows and not holds_waiting(self)
        try:
            output = self._schedule_none() if is_alone else self._schedule_others(num_rows, num_active)
            self._join_rows(output)
            counts = self._others or {}
        finally:
            self._join = self._others = None
        if not self.use_v2_model_runner:
            if counts:
                before = {*batch.req_ids, *counts}
            elif before is not batch.id_set or len(before) != num_active:
                before = batch.id_set = set(batch.req_ids)
            self.prev_step_scheduled_req_ids = before
        if num_active:
            self._note_grammars(rows, batch, output)
            self._steps.append(RowStep(output, batch, counts))
            rows.advance(batch, number_step(self, is_counted=bool(counts)))
        return output

    def _schedule_none(self) -> SchedulerOutput:
        """Returns a step with the rows alone, as there is nothing for vLLM's own code to schedule."""
        output = SchedulerOutput.make_empty()
        output.preempted_req_ids = take_preempted(self)
        output.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        output.free_encoder_mm_hashes = self.encoder_cache_manager.get_freed_mm_hashes()
        self._join_rows(output)
        if self.connector is not None:
            show_to_connector(self, output)
        return output

    def _schedule_others(self, num_rows: int, num_active: int) -> SchedulerOutput:
        """Lets vLLM's own code schedule all requests without a row, within the limits that the rows leave."""
        running, before = self.running, self.prev_step_scheduled_req_ids
        limits = self.max_num_scheduled_tokens, self.max_num_running_reqs
        self.running = running[num_rows:]
        self.prev_step_scheduled_req_ids = {request.request_id for request in self.running} & before
        self.max_num_scheduled_tokens -= num_active
        self.max_num_running_reqs -= num_rows
        self.num_hidden = num_rows
        try:
            return super().schedule()
        finally:
            self.num_hidden = 0
            self.max_num_scheduled_tokens, self.max_num_running_reqs = limits
            self.running = running[:num_rows] + self.running

    def _join_rows(self, output: SchedulerOutput) -> None:
        """Adds the rows to the step that is being made, unless they have joined it."""
        join, self._join = self._join, None
        if join is not None:
            join(output)

    def _add_rows(
        self, rows: ScheduledRows, batch: Batch, events: RowEvents, block_ids: list[BlockIds], output: SchedulerOutput
    ) -> None:
        """Adds the batch to ``output``, in front of the requests that vLLM has scheduled."""
        self._others = output.num_scheduled_tokens
        output.num_common_prefix_blocks = common_prefix(self, rows.req_ids[0])
        if not batch.req_ids:
            return
        at: Any = slice(None) if batch.rows is None else batch.rows
        new_blocks: list[BlockIds | None] = [None] * len(batch.req_ids)
        if block_ids:
            places = events.entering if batch.rows is None else batch.rows.searchsorted(events.entering)
            for place, ids in zip(places.tolist(), block_ids, strict=True):
                new_blocks[place] = ids
        computed = rows.computed[at]
        cached = output.scheduled_cached_reqs
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=batch.req_ids + cached.req_ids if cached.req_ids else batch.req_ids,
            resumed_req_ids=cached.resumed_req_ids,
            new_token_ids=cached.new_token_ids,
            all_token_ids=cached.all_token_ids,
            new_block_ids=new_blocks + cached.new_block_ids,
            num_computed_tokens=computed.tolist() + cached.num_computed_tokens,
            num_output_tokens=(computed - (rows.prompt[at] - 1)).tolist() + cached.num_output_tokens,
        )
        counts = output.num_scheduled_tokens
        output.num_scheduled_tokens = {**batch.counts, **counts} if counts else batch.counts
        output.total_num_scheduled_tokens += len(batch.req_ids)
        show_blocks(output, batch.req_ids)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Lets vLLM count the tokens of requests without a row."""
        if self._others is None:
            super()._update_after_schedule(scheduler_output)
            return
        counts, scheduler_output.num_scheduled_tokens = scheduler_output.num_scheduled_tokens, self._others
        try:
            super()._update_after_schedule(scheduler_output)
        finally:
            scheduler_output.num_scheduled_tokens = counts

    def _note_grammars(self, rows: ScheduledRows, batch: Batch, output: SchedulerOutput) -> None:
        """Says in ``output`` that some of the batch's requests have a grammar, and whether it lacks tokens."""
        if batch.structured:
            output.has_structured_output_requests = True
            at: Any = slice(None) if batch.rows is None else batch.rows
            if self._is_async and (rows.placeholders[at][batch.structured] > 0).any():
                output.pending_structured_output_tokens = True

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if not scheduler_output.has_structured_output_requests:
            return None  # vLLM would look at every request to find this out.
        return super().get_grammar_bitmask(scheduler_output)

    # ---- A step's output arrives ----

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._rows is None or not (self._steps or self._rows.requests):
            return super().update_from_output(scheduler_output, model_runner_output)
        step = self._take_step(scheduler_output)
        found = None if step is None else _plain_tokens(step.batch, model_runner_output)
        if step is None or found is None:
            self._release(self._rows, scheduler_output.num_scheduled_tokens)
            return super().update_from_output(scheduler_output, model_runner_output)
        places, token_lists, token_ids = found
        batch = step.batch
        # Places in the batch whose requests vLLM's own code updates.
        prompts = model_runner_output.prompt_logprobs_dict
        also_theirs = [place for place, req_id in enumerate(batch.req_ids) if req_id in prompts] if prompts else []
        if self.connector is not None and DROPS_STALE_OUTPUTS:
            # If a grammar ends a request, the connector adds to its last output.
            also_theirs += batch.structured
        their_places = self._rows.receive(batch, token_ids, also_theirs)
        self._release(self._rows, step.others)
        rejected = self._accept(batch, token_lists, set(their_places)) if batch.structured else ()
        if (
            their_places
            or step.others
            or self.finished_req_ids_dict
            or self.after_update
            or self._asks_connector
            or model_runner_output.kv_connector_output is not None
            or has_ended_requests(self)
        ):
            rest = copy(scheduler_output)
            rest.num_scheduled_tokens = {batch.req_ids[place]: 1 for place in their_places} | step.others
            theirs = super().update_from_output(rest, model_runner_output)
        else:
            count_read(self)
            stats = self.make_stats(cudagraph_stats=model_runner_output.cudagraph_stats)
            theirs = {} if stats is None else {0: EngineCoreOutputs(scheduler_stats=stats)}
        outputs: list[Any] = plain_outputs(batch, token_lists)
        logprobs = model_runner_output.logprobs
        if logprobs and batch.logprobs:
            for place in batch.logprobs:
                outputs[place].new_logprobs = logprobs.slice_request(places[place], 1)
        for place in rejected:
            outputs[place].finish_reason = FinishReason.ERROR
        return merge(batch, outputs, their_places, theirs)

    def _take_step(self, scheduler_output: SchedulerOutput) -> RowStep | None:
        for index, step in enumerate(self._steps):
            if step.scheduler_output is scheduler_output:
                del self._steps[index]
                return step
        return None

    def _release(self, rows: ScheduledRows, req_ids: Iterable[str]) -> None:
        """Takes requests out of their rows before vLLM's own code reads and writes them."""
        for req_id in req_ids:
            request = self.requests.get(req_id)
            if isinstance(request, RowRequest):
                rows.release(request)

    def _accept(self, batch: Batch, token_lists: list[list[int]], their_places: set[int]) -> list[int]:
        """Advances the grammars by the batch's tokens, except at ``their_places``.

        Returns the places of requests that end because their grammar rejects a token; vLLM 0.16 ends none.
        """
        rejected = []
        for place in batch.structured:
            if place in their_places:
                continue
            req_id, token_ids = batch.req_ids[place], token_lists[place]
            request: Request = self.requests[req_id]
            if advance_grammar(self.structured_output_manager, request, token_ids) is False:
                logger.warning("Unexpected: grammar rejected tokens %s for request %s.", token_ids, req_id)
                if DROPS_STALE_OUTPUTS:
                    request.resumable = False
                    self.finish_requests(req_id, RequestStatus.FINISHED_ERROR)
                    rejected.append(place)
        return rejected


def _plain_tokens(
    batch: Batch, output: ModelRunnerOutput
) -> tuple[range | list[int], list[list[int]], list[int]] | None:
    """Places of a batch's requests in the output, the token list of each request, and all tokens in one list.

    None if there is anything but one token for each request, such as an error or blocks that were not loaded.
    """
    sampled = output.sampled_token_ids
    if (
        not sampled
        or errors_of(output)
        or output.num_nans_in_logits
        or output.pooler_output
        or (output.kv_connector_output is not None and failed_loads(output.kv_connector_output))
    ):
        return None
    count = len(batch.req_ids)
    places: range | list[int] = range(count)
    if output.req_ids == batch.req_ids:
        token_lists = sampled
    elif output.req_ids[:count] == batch.req_ids:
        token_lists = sampled[:count]
    else:
        places = [output.req_id_to_index.get(req_id, -1) for req_id in batch.req_ids]
        if min(places) < 0:
            return None  # A request failed in the step before.
        token_lists = [sampled[place] for place in places]
    try:
        return places, token_lists, [token_id for (token_id,) in token_lists]
    except ValueError:
        return None
