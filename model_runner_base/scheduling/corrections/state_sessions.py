"""Streaming-input sessions of models with recurrent layers: each turn is computed from the session's first token on.

A turn may end while a step is in flight that has read its last token. Keys and values of that step are overwritten by
the next turn, but a state has moved on and cannot be taken back. Idle sessions that kept their states could also hold
all of them, and a request at the head of the queue would keep the sessions behind it from going on.
"""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, StreamingUpdate


class StateSessions(Scheduler):
    """Scheduler whose sessions give up blocks and states between two turns, inherited from before vLLM's."""

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
