"""Requests that end with an error, alone: refused when they arrive, or failed in a step.

The front end gets an output with finish reason ``error`` and the message as its ``stop_reason``
(``vllm_port/request_errors.py`` raises it to the caller).
"""

from concurrent.futures import Future
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from model_runner_base.scheduling.capacity import longest_request

logger = init_logger(__name__)

MAX_ENDED = 4_096
"""Sessions that have ended and may still be sent input, which was under way."""


class RequestFailures(Scheduler):
    """To be inherited from before ``Scheduler`` or ``AsyncScheduler``."""

    reads_errors = True
    """Tells a worker that ``errors`` of its outputs are read."""
    schedules_all = True
    """Whether ``schedule`` sees all requests, rather than those that a subclass leaves to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._errors: list[tuple[int, EngineCoreOutput]] = []
        """Outputs that the next step hands to the front ends, by client."""
        self._ended_sessions: dict[str, None] = {}
        """Ids of the latest sessions that were aborted or failed, oldest first."""
        self._failed_grammars: list[tuple[str, BaseException]] = []
        """By request, as the threads that compile them found out."""
        longest = longest_request(self, self.kv_cache_config, self.kv_cache_manager.block_pool.num_gpu_blocks)
        if longest < self.max_model_len:
            logger.warning(
                "The KV cache has blocks for requests of %d tokens, prompt and output together, fewer than "
                "max_model_len=%d: longer prompts are refused, and outputs end there.",
                longest,
                self.max_model_len,
            )
            self.max_model_len = longest

    # ---- When a request arrives ----

    def add_request(self, request: Request) -> None:
        if request.request_id in self._ended_sessions:
            self._report(request, "this session has ended")
            return
        self._watch_grammar(request)
        reason = None if request.request_id in self.requests else self._why_unservable(request)
        if reason is None:
            super().add_request(request)
            if not request.resumable:  # Nothing comes after a session's last input.
                self._ended_sessions.pop(request.request_id, None)
        else:
            self._note_end(request)
            self._report(request, reason)

    def _why_unservable(self, request: Request) -> str | None:
        """What a request asks for that no step can ever do; it would wait for ever, and hold up those behind it."""
        return why_too_long(request.num_prompt_tokens, self.max_model_len)

    def _watch_grammar(self, request: Request) -> None:
        """A grammar that does not compile ends its request; vLLM's loop would raise the error, and end the engine."""
        structured = request.structured_output_request
        compiling = None if structured is None else structured._grammar
        if not isinstance(compiling, Future):
            return
        compiled: Future[Any] = Future()

        def hand_over(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                compiled.set_result(done.result())
            else:
                self._failed_grammars.append((request.request_id, error))

        assert structured is not None
        structured._grammar = compiled
        compiling.add_done_callback(hand_over)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
            self._note_end(request)
        return super()._free_request(request, *args, **kwargs)

    def _note_end(self, request: Request) -> None:
        """Remembers a session that was aborted or failed: input that was under way would begin it anew."""
        if request.resumable:
            self._ended_sessions[request.request_id] = None
            while len(self._ended_sessions) > MAX_ENDED:
                del self._ended_sessions[next(iter(self._ended_sessions))]

    # ---- When a step is scheduled ----

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        while self._failed_grammars:
            req_id, error = self._failed_grammars.pop()
            if (request := self.requests.get(req_id)) is not None:
                self._fail(request, f"the grammar of structured_outputs does not compile: {error}")
        step = super().schedule(*args, **kwargs)
        if not step.total_num_scheduled_tokens and not self.running and self.schedules_all:
            self._when_nothing_runs()
        return step

    def _when_nothing_runs(self) -> None:
        """Called after a step that has nothing to do, while requests may wait; does nothing here."""

    # ---- When a step's output arrives ----

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """``errors`` of the runner's output end the requests that they name."""
        for req_id, reason in errors_of(model_runner_output).items():
            if (request := self.requests.get(req_id)) is not None:
                self._fail(request, reason or why_no_token(request))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._errors:
            errors, self._errors = self._errors, []
            for client, output in errors:
                outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """Two rules go before ``min_tokens``: a finished grammar, which leaves nothing but to stop, and the length.

        vLLM 0.16 never ends a request that has the longest length before ``min_tokens``, and computes no more of it.
        """
        params = request.sampling_params
        if params is None or not params.min_tokens:
            return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        asked, most = params.min_tokens, self.max_model_len - request.num_prompt_tokens
        is_stop = request.use_structured_output and not params.all_stop_token_ids.isdisjoint(new_token_ids)
        params.min_tokens = 0 if is_stop else min(asked, most)
        try:
            return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        finally:
            params.min_tokens = asked

    def _fail(self, request: Request, reason: str) -> None:
        """Ends a request that was queued or runs."""
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        self._report(request, reason)

    def _report(self, request: Request, reason: str) -> None:
        logger.error("Request %s ended with an error: %s", request.request_id, reason)
        output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
        self._errors.append((request.client_index, output))
        # So that there is a next step, though nothing may be scheduled any more.
        self.finished_req_ids.add(request.request_id)


NO_ERRORS: dict[str, str | None] = {}


def errors_of(output: ModelRunnerOutput) -> dict[str, str | None]:
    """Requests that failed in a step, as a runner of this library tells; None stands for "no token is allowed"."""
    return getattr(output, "errors", NO_ERRORS)


def why_no_token(request: Request) -> str:
    """Which rules of a request met, that no token was left."""
    params = request.sampling_params
    assert params is not None
    rules = {
        "structured_outputs": request.use_structured_output,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "min_tokens": request.num_output_tokens < params.min_tokens,
        "logit_bias": params.logit_bias,
        "custom logits processors": params.extra_args,
    }
    names = ", ".join(name for name, is_asked in rules.items() if is_asked)
    if not names:
        return "the model's logits are not numbers (NaN): no token can be drawn"
    return f"no token is left that {names} allow after {request.num_output_tokens} output tokens: relax one of them"


def why_too_long(num_tokens: int, longest: int) -> str | None:
    """Why a prompt leaves no place for an output token; None if it does."""
    if num_tokens < longest:
        return None
    return (
        f"a prompt of {num_tokens} tokens and one output token do not fit the {longest} tokens that a request can have "
        "here: shorten it, or raise max_model_len, num_gpu_blocks_override or kv_cache_memory_bytes"
    )
