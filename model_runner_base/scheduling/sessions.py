"""Streaming-input sessions whose turn ends while more of it is under way.

vLLM's rule for a session that goes on: its outputs but the last become part of its prompt, and the next input follows
them. vLLM 0.16 reads what that is off ``num_computed_tokens``, which says it only where a turn's last token came alone
and no step was in flight. Elsewhere it computes tokens at wrong positions or not at all, fails, or loses the session.
"""

from copy import copy
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, StreamingUpdate


class SessionTurns(Scheduler):
    """To be inherited from before ``Scheduler`` or ``AsyncScheduler``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: dict[str, int] = {}
        """Steps in flight, by session, that were scheduled for a turn which has ended since."""
        self._unqueued: list[Request] = []
        """Sessions whose turn ended while they were preempted."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Outputs of a turn that has ended are nobody's, as those of a request that was aborted."""
        late = self._late.keys() & scheduler_output.num_scheduled_tokens.keys() if self._late else ()
        if late:
            counts = scheduler_output.num_scheduled_tokens
            scheduler_output = copy(scheduler_output)
            scheduler_output.num_scheduled_tokens = {name: counts[name] for name in counts if name not in late}
            for req_id in late:
                self._late[req_id] -= 1
            self._late = {req_id: count for req_id, count in self._late.items() if count}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._unqueued:
            # vLLM takes whoever stopped out of the queue, though a session has just been put there again.
            for session in self._unqueued:
                self.waiting.add_request(session)
            self._unqueued = []
        return outputs

    def _update_request_with_output(self, request: Request, new_token_ids: list[int]) -> tuple[list[int], bool]:
        num_accepted = len(new_token_ids)
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids)
        if stopped and request.resumable:
            # Placeholders stand for accepted tokens behind the stop, which are thrown away, and for steps in flight.
            num_in_flight = request.num_output_placeholders - (num_accepted - len(new_token_ids))
            if num_in_flight > 0:
                # With drafts several stand for a step, but then no more than one is in flight.
                self._late[request.request_id] = 1 if self.num_spec_tokens else num_in_flight
        return new_token_ids, stopped

    def _handle_stopped_request(self, request: Request) -> bool:
        is_preempted = not request.num_computed_tokens
        is_over = super()._handle_stopped_request(request)
        if is_preempted and not is_over:
            self._unqueued.append(request)
        return is_over

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """The session's next input follows the outputs of its turn, all but the last.

        - ``num_computed_tokens``: vLLM keeps the outputs up to there. It is too high by accepted drafts behind the stop
          and by steps in flight, whose keys and values are overwritten; it is 0 if the session was preempted. Cache
          blocks allocated beyond stay the session's, and hold its next tokens.
        - ``num_output_placeholders``: what they stand for never comes.
        - ``spec_token_ids``: they were drafted to follow the turn, not the input.
        - ``block_hashes``: one may be of a block whose last token is the output that is dropped. No such block is in
          the prefix cache, where only computed tokens are.
        """
        num_computed, num_kept = session.num_computed_tokens, session.num_tokens - 1
        session.num_computed_tokens = num_kept
        session.num_output_placeholders = 0
        session.spec_token_ids = []
        del session.block_hashes[num_kept // self.block_size :]
        super()._update_request_as_session(session, update)
        session.num_computed_tokens = min(num_computed, num_kept)
