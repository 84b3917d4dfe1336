"""Streaming-input sessions: those of recurrent layers, and those whose turn ends while outputs of it are under way."""

from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from model_runner_base.scheduling.corrections.turn_params import TurnParams


class StateSessions(Scheduler):
    """Scheduler whose sessions give up blocks and states between two turns, inherited from before vLLM's.

    For models with recurrent layers: each turn is computed from the session's first token on. A turn may end while a
    step is in flight that has read its last token. Keys and values of that step are overwritten by the next turn, but a
    state has moved on and cannot be taken back. Idle sessions that kept their states could also hold all of them, and a
    request at the head of the queue would keep the sessions after it from going on.
    """

    def _handle_stopped_request(self, request: Request) -> bool:
        is_over = super()._handle_stopped_request(request)
        if not is_over and self.has_mamba_layers:
            self.kv_cache_manager.free(request)
        return is_over

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        super()._update_request_as_session(session, update)
        if self.has_mamba_layers:
            self.kv_cache_manager.free(session)
            session.num_computed_tokens = 0


@dataclass
class LateOutputs:
    """Outputs of a request, still in flight, that must be dropped.

    They belong to a turn that has ended, or to a request that a reset of the prefix cache starts again.
    """

    count: int = 0
    prompt_logprobs: Any = None
    """Log probabilities of the prompt that came with a late output, and are not computed again."""


class SessionTurns(TurnParams):
    """Mixin that keeps a session right if its turn ends early, listed before vLLM's scheduler among the bases.

    vLLM's rule for a session that goes on: all outputs but the last become part of its prompt, and the next input
    follows them. vLLM 0.16 takes the number of those outputs from ``num_computed_tokens``. That is right only if the
    turn's last token came alone and no step was in flight. Otherwise vLLM computes tokens at wrong positions or not at
    all, fails, or loses the session.
    """

    late_outputs: dict[str, LateOutputs]

    def _before_update(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> SchedulerOutput:
        """Drops late outputs, as vLLM drops those of an aborted request."""
        if self.late_outputs:
            scheduler_output = self._without_late(scheduler_output, output)
            self._hand_over_prompt_logprobs(scheduler_output, output)
        return super()._before_update(scheduler_output, output)

    def _without_late(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> SchedulerOutput:
        """Returns the step without the requests whose outputs are late.

        A prompt's chunk yields no token, so it does not count as a late output.
        """
        counts = scheduler_output.num_scheduled_tokens
        late = {req_id: each for req_id, each in self.late_outputs.items() if each.count and req_id in counts}
        if not late:
            return scheduler_output
        for req_id, each in late.items():
            if _yields(output, req_id):
                each.count -= 1
                each.prompt_logprobs = output.prompt_logprobs_dict.get(req_id, each.prompt_logprobs)
            if req_id not in self.requests or (not each.count and each.prompt_logprobs is None):
                del self.late_outputs[req_id]
        scheduler_output = copy(scheduler_output)
        scheduler_output.num_scheduled_tokens = {name: counts[name] for name in counts if name not in late}
        return scheduler_output

    def _hand_over_prompt_logprobs(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Adds the kept log probabilities of a prompt to the first token of the request that was started again."""
        for req_id in self.late_outputs.keys() & scheduler_output.num_scheduled_tokens.keys():
            if _yields(output, req_id):
                output.prompt_logprobs_dict[req_id] = self.late_outputs.pop(req_id).prompt_logprobs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        for req_id in self.late_outputs.keys() - self.requests.keys():
            del self.late_outputs[req_id]
        return finished

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drops the tokens in flight of running requests that are started again, for each as many as it has.

        Under asynchronous scheduling vLLM 0.16 drops one for each request, even if its prompt is not finished.
        """
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
                self.late_outputs.setdefault(req_id, LateOutputs()).count += count
        return was_reset

    def _num_in_flight(self, num_placeholders: int) -> int:
        """Number of steps in flight that yield tokens of a request with ``num_placeholders``."""
        # With drafts, one step has several placeholders, but then at most one step is in flight.
        return min(num_placeholders, 1) if self.num_spec_tokens else num_placeholders

    def _when_turn_stops(self, request: Request, num_dropped: int) -> None:
        """Notes the outputs of steps in flight; other placeholders are those of accepted drafts after the stop."""
        num_places = request.num_output_placeholders - num_dropped
        if num_places > 0:
            late = self.late_outputs.setdefault(request.request_id, LateOutputs())
            late.count = self._num_in_flight(num_places)
        super()._when_turn_stops(request, num_dropped)

    def _handle_stopped_request(self, request: Request) -> bool:
        is_preempted = not request.num_computed_tokens
        is_over = super()._handle_stopped_request(request)
        if is_preempted and not is_over:
            self.after_update.append(partial(self._queue_again, request))
        return is_over

    def _queue_again(self, session: Request, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Puts a session back into the queue, from which vLLM removes requests that stop while they are preempted."""
        if session.request_id in self.requests:
            self.waiting.add_request(session)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """Appends the session's next input to the outputs of its turn, all but the last.

        - ``num_computed_tokens``: vLLM keeps the outputs up to there. It is too high by accepted drafts after the stop
          and by steps in flight, whose keys and values are overwritten. It is 0 if the session was preempted. Cache
          blocks allocated beyond it stay with the session, for its next tokens.
        - ``num_output_placeholders``: set to 0, since their tokens never come.
        - ``spec_token_ids``: removed, since they were drafted to follow the turn, not the input.
        - ``block_hashes``: the hash of a block with the dropped output as its last token is removed. No such block is
          in the prefix cache, which has only computed tokens.
        """
        num_computed, num_kept = session.num_computed_tokens, session.num_tokens - 1
        session.num_computed_tokens = num_kept
        session.num_output_placeholders = 0
        session.spec_token_ids = []
        del session.block_hashes[num_kept // self.block_size :]
        super()._update_request_as_session(session, update)
        session.num_computed_tokens = min(num_computed, num_kept)


def _yields(output: ModelRunnerOutput, req_id: str) -> bool:
    """Whether a step has a token of a request; a request that failed has none."""
    place = output.req_id_to_index.get(req_id)
    return place is not None and bool(output.sampled_token_ids) and bool(output.sampled_token_ids[place])
