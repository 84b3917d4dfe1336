"""Streaming-input sessions whose turn ends while more of it is under way.

vLLM's rule for a session that goes on: its outputs but the last become part of its prompt, and the next input follows
them. vLLM 0.16 reads what that is off ``num_computed_tokens``, which says it only where a turn's last token came alone
and no step was in flight. Elsewhere it computes tokens at wrong positions or not at all, fails, or loses the session.
"""

from copy import copy
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from model_runner_base.scheduling.turns import TurnParams


class SessionTurns(TurnParams):
    """To be inherited from before ``Scheduler`` or ``AsyncScheduler``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: dict[str, int] = {}
        """Outputs in flight, by request, that nothing waits for: of a turn that has ended since, or of a request that a
        reset of the prefix cache has begin anew."""
        self._late_prompt_logprobs: dict[str, Any] = {}
        """What came with a late output and is not computed again."""
        self._unqueued: list[Request] = []
        """Sessions whose turn ended while they were preempted."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Late outputs are dropped, as those of a request that was aborted."""
        if self._late:
            scheduler_output = self._without_late(scheduler_output, model_runner_output)
        if self._late_prompt_logprobs:
            self._hand_over_prompt_logprobs(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._unqueued:
            # vLLM takes what stopped out of the queue, though a session has just been put there again.
            for session in self._unqueued:
                if session.request_id in self.requests:
                    self.waiting.add_request(session)
            self._unqueued = []
        return outputs

    def _without_late(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> SchedulerOutput:
        """The step less the requests whose outputs are late.

        A chunk of a prompt yields nothing, so it does not count.
        """
        counts = scheduler_output.num_scheduled_tokens
        late = self._late.keys() & counts.keys()
        if not late:
            return scheduler_output
        for req_id in late:
            if _yields(output, req_id):
                self._late[req_id] -= 1
                if req_id in output.prompt_logprobs_dict:
                    self._late_prompt_logprobs[req_id] = output.prompt_logprobs_dict[req_id]
        self._late = {req_id: count for req_id, count in self._late.items() if count and req_id in self.requests}
        scheduler_output = copy(scheduler_output)
        scheduler_output.num_scheduled_tokens = {name: counts[name] for name in counts if name not in late}
        return scheduler_output

    def _hand_over_prompt_logprobs(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """A request that began anew gets them with its first token."""
        for req_id in self._late_prompt_logprobs.keys() & scheduler_output.num_scheduled_tokens.keys():
            if _yields(output, req_id):
                output.prompt_logprobs_dict[req_id] = self._late_prompt_logprobs.pop(req_id)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        for kept in (self._late, self._late_prompt_logprobs):
            for req_id in kept.keys() - self.requests.keys():
                del kept[req_id]
        return finished

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Running requests that are to begin anew lose the tokens in flight, each as many as it has: vLLM 0.16 drops
        one of each under asynchronous scheduling, also of a request whose prompt is not finished."""
        in_flight = {}
        if reset_running_requests:
            for request in self.running:
                if count := self._num_in_flight(request.num_output_placeholders):
                    in_flight[request.request_id] = count
        was_reset = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if reset_running_requests:
            for request in self.waiting:
                request.discard_latest_async_tokens = False
            for req_id, count in in_flight.items():
                self._late[req_id] = self._late.get(req_id, 0) + count
        return was_reset

    def _num_in_flight(self, num_placeholders: int) -> int:
        """Steps in flight that yield tokens of a request with so many placeholders."""
        # With drafts several stand for a step, but then no more than one is in flight.
        return min(num_placeholders, 1) if self.num_spec_tokens else num_placeholders

    def _update_request_with_output(self, request: Request, new_token_ids: list[int]) -> tuple[list[int], bool]:
        num_accepted = len(new_token_ids)
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids)
        if stopped and request.resumable:
            # Placeholders stand for accepted tokens behind the stop, which are thrown away, and for steps in flight.
            num_places = request.num_output_placeholders - (num_accepted - len(new_token_ids))
            if num_places > 0:
                self._late[request.request_id] = self._num_in_flight(num_places)
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


def _yields(output: ModelRunnerOutput, req_id: str) -> bool:
    """Whether a step has a token of a request; it has none of one that failed."""
    place = output.req_id_to_index.get(req_id)
    return place is not None and bool(output.sampled_token_ids) and bool(output.sampled_token_ids[place])
