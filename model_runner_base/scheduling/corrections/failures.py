"""Requests that end with an error, without others: refused when they arrive, or failed in a step.

The front end gets an output with finish reason ``error`` and the message as its ``stop_reason``
(``admission/request_errors.py`` raises it to the caller).
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from model_runner_base.scheduling.releases import FREES_BY_TOKENS_READ, ends_failed_grammars, num_batches
from model_runner_base.scheduling.state_group import StateSpec
from model_runner_base.scheduling.step_hooks import StepHooks, errors_of

logger = init_logger(__name__)

MAX_ENDED = 4_096
"""Number of ended sessions that are remembered, since input for them may be under way."""
MORE_BLOCKS = "raise num_gpu_blocks_override or kv_cache_memory_bytes, or lower max_num_batched_tokens"


class RequestFailures(StepHooks):
    """Mixin that ends failed requests alone, listed before ``Scheduler`` or ``AsyncScheduler`` among the bases."""

    reads_errors = True
    """Whether the scheduler reads ``errors`` of a worker's outputs; the worker looks for this attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ended_sessions: dict[str, None] = {}
        """Ids of the latest sessions that were aborted or failed, oldest first."""
        config, num_blocks = self.kv_cache_config, self.kv_cache_manager.block_pool.num_gpu_blocks
        at_once = longest_request(self, config, num_blocks)
        longest = max(at_once, longest_request(self, config, num_blocks, self._num_ahead_of_window()))
        if longest <= num_sampled_tokens(self) and longest < self.max_model_len:
            raise ValueError(
                "the KV cache has too few blocks for any request, since block 0 is given to none: raise "
                "kv_cache_memory_bytes or num_gpu_blocks_override"
            )
        if longest < self.max_model_len:
            logger.warning(
                "The KV cache has blocks for requests of %d tokens, prompt and output together, fewer than "
                "max_model_len=%d: longer prompts are refused, and outputs end there.",
                longest,
                self.max_model_len,
            )
            self.max_model_len = longest
        if at_once < self.max_model_len:
            logger.warning(
                "The KV cache has blocks for %d tokens of a request at once: longer prompts are refused. Outputs go on "
                "to %d tokens, but a request that is preempted beyond the first number ends with an error.",
                at_once,
                self.max_model_len,
            )
        self._too_long = partial(too_long_reason, longest=at_once, num_sampled=num_sampled_tokens(self))
        self._preempted: list[Request] = []
        """Requests that were preempted, where one may be too long to be computed again."""
        self._may_not_resume = at_once < self.max_model_len
        if not num_sampled_tokens(self) and not hasattr(self, "num_sampled_tokens_per_step"):
            self.max_model_len += 1  # Some releases leave a place for an output token in every prompt that is cut.

    # ---- When a request arrives ----

    def add_request(self, request: Request) -> None:
        if request.request_id in self._ended_sessions:
            self._report(request, "this session has ended")
            return
        self._watch_grammar(request)
        reason = None if request.request_id in self.requests else self._unservable_reason(request)
        if reason is None:
            super().add_request(request)
            if not request.resumable:  # Nothing comes after a session's last input.
                self._ended_sessions.pop(request.request_id, None)
        else:
            self._note_end(request)
            self._report(request, reason)

    def _unservable_reason(self, request: Request) -> str | None:
        """Error of a request that no step can serve, and that would block later requests; None if one can serve it."""
        return self._too_long(request.num_prompt_tokens)

    def _num_ahead_of_window(self) -> int:
        """Number of tokens beyond a window of keys that a decoding request holds blocks for, less one."""
        num_new = 1 + self.num_spec_tokens + self.num_lookahead_tokens
        return num_new * num_batches(self) - 1

    def _watch_grammar(self, request: Request) -> None:
        """Makes a grammar that does not compile end its request alone, as newer releases do by themselves.

        The loop of vLLM 0.16 would raise, and end the engine.
        """
        structured = request.structured_output_request
        compiling = None if structured is None else structured._grammar
        if not isinstance(compiling, Future) or ends_failed_grammars(self):
            return
        compiled: Future[Any] = Future()

        def hand_over(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                compiled.set_result(done.result())
            else:
                self.before_schedule.append(partial(self._fail_grammar, request.request_id, error))

        assert structured is not None
        structured._grammar = compiled
        compiling.add_done_callback(hand_over)

    def _fail_grammar(self, req_id: str, error: BaseException) -> None:
        if (request := self.requests.get(req_id)) is not None:
            self._fail(request, f"the grammar of structured_outputs does not compile: {error}")

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
            self._note_end(request)
        return super()._free_request(request, *args, **kwargs)

    def _note_end(self, request: Request) -> None:
        """Remembers a session that was aborted or failed, because input under way would start it again."""
        if request.resumable:
            self._ended_sessions[request.request_id] = None
            while len(self._ended_sessions) > MAX_ENDED:
                del self._ended_sessions[next(iter(self._ended_sessions))]

    # ---- In a step ----

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if self._may_not_resume:
            if not self._preempted:
                self.before_schedule.append(self._end_long_requests)
            self._preempted.append(request)

    def _end_long_requests(self) -> None:
        """Ends requests with an error that decoded within windows, and would now be computed in chunks that the cache
        has too few blocks for. Tokens in flight may still make one too long, so each is watched until it runs."""
        waiting = [each for each in self._preempted if each.status == RequestStatus.PREEMPTED]
        long = [each for each in waiting if self._too_long(each.num_tokens) is not None]
        for request in long:
            self._fail(
                request,
                f"the request was preempted at {request.num_tokens} tokens, and the KV cache has too few blocks to "
                f"compute them again: {MORE_BLOCKS}",
            )
        self._preempted = [each for each in waiting if each not in long]
        if self._preempted:
            self.after_schedule.append(lambda step: self.before_schedule.append(self._end_long_requests))

    def _before_update(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> SchedulerOutput:
        """Ends the requests that ``errors`` of the runner's output names."""
        for req_id, reason in errors_of(output).items():
            if (request := self.requests.get(req_id)) is not None:
                self._forget_blocks(request)
                self._fail(request, reason or no_token_reason(request))
        return super()._before_update(scheduler_output, output)

    def _forget_blocks(self, request: Request) -> None:
        """Takes a failed request's blocks out of the prefix cache.

        vLLM puts them there when it schedules a request, and the runner may have left the request out of the step.
        """
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            blocks = manager.req_to_blocks.get(request.request_id, ())
            manager.block_pool.evict_blocks({block.block_id for block in blocks})

    @contextmanager
    def _around_check(self, request: Request, new_token_ids: list[int]) -> Iterator[None]:
        """Lets two rules end a request before ``min_tokens``: a finished grammar, and the longest length.

        A finished grammar allows only stop tokens. vLLM 0.16 never ends a request that reaches the longest length
        before ``min_tokens``, and computes no more of it.
        """
        params = request.sampling_params
        if params is None or not params.min_tokens:
            yield
            return
        asked, most = params.min_tokens, self.max_model_len - request.num_prompt_tokens
        is_stop = request.use_structured_output and not params.all_stop_token_ids.isdisjoint(new_token_ids)
        params.min_tokens = 0 if is_stop else min(asked, most)
        try:
            yield
        finally:
            params.min_tokens = asked

    def _fail(self, request: Request, reason: str) -> None:
        """Ends a request that is queued or running."""
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        self._report(request, reason)

    def _report(self, request: Request, reason: str) -> None:
        logger.error("Request %s ended with an error: %s", request.request_id, reason)
        output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
        self.after_update.append(partial(_hand_over, request.client_index, output))
        # So that there is a next step, even if nothing is scheduled any more.
        self.finished_req_ids.add(request.request_id)


def _hand_over(client: int, output: EngineCoreOutput, outputs: dict[int, EngineCoreOutputs]) -> None:
    outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)


def no_token_reason(request: Request) -> str:
    """Error of a request whose rules allow no token, with the names of the rules."""
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


def too_long_reason(num_tokens: int, longest: int, num_sampled: int) -> str | None:
    """Error of a prompt that leaves no space for ``num_sampled`` output tokens, one or none; None if there is some."""
    if num_tokens + num_sampled <= longest:
        return None
    fits = "and one output token do not fit" if num_sampled else "does not fit"
    return (
        f"a prompt of {num_tokens} tokens {fits} the {longest} tokens that a request can have here at once: shorten "
        f"it, or raise max_model_len, or {MORE_BLOCKS}"
    )


# ---- The longest request that a KV cache can hold ----


def longest_request(scheduler: Any, config: KVCacheConfig, num_blocks: int, num_ahead: int | None = None) -> int:
    """Length of the longest request that the whole cache of ``num_blocks`` can hold: at most ``max_model_len`` tokens.

    The last token is sampled but never computed, unless the model pools. Drafts after it are computed, so they need
    blocks. ``num_ahead`` is the number of tokens after a window that need blocks at a time, less one; None: those of
    the largest chunks that may be in flight.
    """
    num_ahead_of_window = num_ahead
    if num_ahead_of_window is None:
        num_chunks = num_batches(scheduler) if FREES_BY_TOKENS_READ else 1
        num_ahead_of_window = num_chunks * scheduler.scheduler_config.max_num_batched_tokens
    num_sampled = num_sampled_tokens(scheduler)
    num_drafts = scheduler.num_spec_tokens + scheduler.num_lookahead_tokens
    low, high = 0, scheduler.max_model_len
    while low < high:
        length = (low + high + 1) // 2
        num_computed = min(length - num_sampled + num_drafts, scheduler.max_model_len)
        # One block is the null block, which no request gets.
        if _num_blocks(config, num_computed, num_ahead_of_window, scheduler) < num_blocks:
            low = length
        else:
            high = length - 1
    return low


def num_sampled_tokens(scheduler: Any) -> int:
    """Number of tokens that a request needs a place for after its prompt: one, or none in a pooling model."""
    return 0 if scheduler.vllm_config.model_config.runner_type == "pooling" else 1


def _num_blocks(config: KVCacheConfig, num_tokens: int, num_ahead: int, scheduler: Any) -> int:
    """Number of blocks, over all groups, that a request with ``num_tokens`` computed tokens holds at a time."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    # States of recurrent layers are not blocks of the cache.
    paged = [spec for spec in specs if not isinstance(spec, StateSpec)]
    return sum(_num_group_blocks(spec, num_tokens, num_ahead, scheduler) for spec in paged)


def _num_group_blocks(spec: Any, num_tokens: int, num_ahead: int, scheduler: Any) -> int:
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)  # Layers of one type but several sizes.
    if isinstance(spec, FullAttentionSpec):
        # Each of these ranks keeps its part of the positions.
        return -(-num_tokens // (spec.block_size * scheduler.dcp_world_size))
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if window is None:
        return spec.max_memory_usage_bytes(scheduler.vllm_config) // spec.page_size_bytes
    # vLLM frees the blocks before a window, and then allocates those of a step's tokens. A span of n + 1 tokens lies in
    # n / block_size blocks and one more, at most.
    return min(-(-num_tokens // spec.block_size), -(-(window - 1 + num_ahead) // spec.block_size) + 1)
