"""Turns of streaming-input sessions: each has parameters of its own, and a session that grows too long ends.

For a whole session, vLLM keeps the values that ``Request.__init__`` copies from the parameters of its first turn: the
grammar, whether the prefix cache is read, and in some releases ``max_tokens``. If a turn's input has already arrived,
vLLM begins the turn before it has accounted for the turn before. The last token of that one would then advance the new
turn's grammar.
"""

from collections import deque
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus, StreamingUpdate
from vllm.v1.structured_output.request import StructuredOutputRequest

from model_runner_base.scheduling.corrections.failures import RequestFailures

_STATUSES = RequestStatus.__members__
WAITING_FOR_GRAMMAR = _STATUSES.get("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR") or _STATUSES["WAITING_FOR_FSM"]
"""Status of a request whose grammar is being compiled, by the name of newer or of older releases."""
READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""Statuses of a request that waits only to be scheduled."""


@dataclass
class Turn(StreamingUpdate):
    """Input of a session's next turn, with the values that a request of its own would have."""

    structured_output_request: StructuredOutputRequest | None = None
    skip_reading_prefix_cache: bool = False


class TurnParams(RequestFailures):
    """Mixin for sessions with parameters by turn, listed before ``Scheduler`` or ``AsyncScheduler`` among the bases."""

    def add_request(self, request: Request) -> None:
        session = self.requests.get(request.request_id)
        if session is None or not request.resumable or session.streaming_queue is None:
            super().add_request(request)
            return
        self._watch_grammar(request)
        turn = _turn_of(request)
        if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._update_request_as_session(session, turn)
        else:
            session.streaming_queue.append(turn)

    def _num_idle_seats(self) -> int:
        """Number of sessions that wait for input and take no other request's place.

        With a runner of this library those sessions block no others, since their rows are given away
        (``RequestStates.free_rows_for``). vLLM's own runner does not give rows away.
        """
        is_vllms_own = str(self.vllm_config.parallel_config.worker_cls).startswith("vllm.")
        return 0 if is_vllms_own else self.num_waiting_for_streaming_input

    def _when_nothing_runs(self) -> None:
        """Gives blocks of sessions that wait for input to requests that wait for blocks, from the next step on."""
        if getattr(self, "pause_state", 0):  # Newer releases may pause the engine; requests then wait for it to go on.
            return
        queues = self.waiting, getattr(self, "kv_holding_waiting", ())  # The second exists in newer releases.
        if any(request.status in READY for queue in queues for request in queue):
            self._give_up_idle_blocks()

    def _give_up_idle_blocks(self) -> None:
        """Frees cache blocks and encoder outputs of sessions that do not run, as if they were preempted."""
        for session in self.requests.values():
            if session.resumable and session.status != RequestStatus.RUNNING and session.num_computed_tokens:
                self.kv_cache_manager.free(session)
                self.encoder_cache_manager.free(session)
                session.num_computed_tokens = 0

    def _before_bitmask(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Leaves out turns whose grammar is still being compiled, since this step belongs to the turn before."""
        self.compiling_turns = {
            req_id
            for req_id in self.compiling_turns
            if (session := self.requests.get(req_id)) and session.status == WAITING_FOR_GRAMMAR
        }
        counts = scheduler_output.num_scheduled_tokens
        if not self.compiling_turns.isdisjoint(counts):
            scheduler_output = copy(scheduler_output)
            scheduler_output.num_scheduled_tokens = {
                req_id: count for req_id, count in counts.items() if req_id not in self.compiling_turns
            }
        return super()._before_bitmask(scheduler_output)

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        """Resets the cache; first frees blocks of sessions that wait for input, for which vLLM would raise an error."""
        if reset_running_requests:
            self._give_up_idle_blocks()
        return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)

    def _handle_stopped_request(self, request: Request) -> bool:
        queue = request.streaming_queue
        if not request.resumable or not queue or queue[0] is None:
            return super()._handle_stopped_request(request)
        turn = queue.popleft()
        assert isinstance(turn, Turn)
        request.streaming_queue = deque()
        super()._handle_stopped_request(request)
        request.streaming_queue = queue
        self.after_update.append(partial(self._begin_turn, request, turn))
        return False

    def _begin_turn(self, session: Request, turn: Turn, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Begins a turn; called once vLLM has accounted for the turn before."""
        if self.requests.get(session.request_id) is session:
            self._update_request_as_session(session, turn)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        assert isinstance(update, Turn)
        # The prompt takes all outputs but the last.
        reason = self._too_long(session.num_tokens - 1 + len(update.prompt_token_ids or ()))
        if reason is not None:
            self._fail(session, f"this session is too long: {reason}")
            return
        super()._update_request_as_session(session, update)
        session.max_tokens = update.max_tokens
        session.stop_reason = None
        session.structured_output_request = update.structured_output_request
        session.skip_reading_prefix_cache = update.skip_reading_prefix_cache
        if session.structured_output_request is not None:
            session.status = WAITING_FOR_GRAMMAR
            self.compiling_turns.add(session.request_id)


def _turn_of(request: Request) -> Turn:
    return Turn(
        mm_features=request.mm_features,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        arrival_time=request.arrival_time,
        sampling_params=request.sampling_params,
        structured_output_request=request.structured_output_request,
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
    )
