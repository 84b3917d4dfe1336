"""Differences of vLLM's releases in what their schedulers keep of a request and of a step."""

from inspect import signature
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import output as step_output
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

DROPS_STALE_OUTPUTS = "is_stale" in signature(Scheduler._update_request_with_output).parameters
"""Whether vLLM itself drops the outputs of steps that were in flight when a request was preempted or a turn ended."""
FREES_BY_TOKENS_READ = "processed_computed_tokens" in signature(KVCacheManager.remove_skipped_blocks).parameters
"""Whether vLLM frees blocks before a window by the tokens that have been read, rather than by those in flight."""
LOOKS_AT_RESUMED_LOADS = "num_scheduled_tokens" in signature(Scheduler._handle_invalid_blocks).parameters
"""Whether vLLM looks for blocks that failed to load among all that a request had before the step, rather than among
those that it had when it first ran."""

_COMMON = {
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "scheduled_encoder_inputs",
    "num_common_prefix_blocks",
    "finished_req_ids",
    "free_encoder_mm_hashes",
    "preempted_req_ids",
    "has_structured_output_requests",
    "pending_structured_output_tokens",
    "num_invalid_spec_tokens",
    "kv_connector_metadata",
    "ec_connector_metadata",
}
_LATER = {
    "encoder_input_updates",
    "scheduled_encoder_input_stats",
    "has_sync_kv_loads",
    "aux_output_connector_metadata",
    "ec_manager_metadata",
    "new_block_ids_to_zero",
    "kv_cache_block_copies",
    "kv_connector_block_state",
    "num_spec_tokens_to_schedule",
    "skip_drafts",
}


def has_known_steps() -> bool:
    """Whether a step has the fields of vLLM 0.16 or of 0.33 alone.

    With others, a request may be in a state that rows do not know. A request in steady decode leaves the later fields
    at their defaults, but for the list of blocks to be zeroed, which this library's runner does not read.
    """
    return set(SchedulerOutput.__dataclass_fields__) in (_COMMON, _COMMON | _LATER)


def is_core_paused(core: Any) -> bool:
    """Whether an engine core holds requests back; its scheduler does not know of that in older releases."""
    return getattr(core, "_scheduler_paused", False) or is_paused(core.scheduler)


def stop_tokens(request: Request) -> list[int]:
    """Tokens that end a request, its end-of-sequence token last."""
    params = request.sampling_params
    assert params is not None
    if hasattr(request, "eos_token_id"):
        end = None if params.ignore_eos else request.eos_token_id
    else:
        end = getattr(params, "eos_token_id", None)
    return [*(params.stop_token_ids or ()), *(() if end is None else (end,))]


def is_plain_decode(request: Request) -> bool:
    """Whether the request has none of the states that only some releases know: outputs to drop, repetition
    detection."""
    return not (
        getattr(request, "discard_latest_async_tokens", False)
        or getattr(request, "num_stale_output_tokens", 0)
        or getattr(request.sampling_params, "repetition_detection", None)
    )


def num_in_flight(request: Request) -> int:
    """Number of tokens of steps whose output has not been read; 0 if this vLLM does not count them."""
    return getattr(request, "num_in_flight_tokens", 0)


def num_batches(scheduler: Scheduler) -> int:
    """Largest number of steps in flight."""
    config = scheduler.vllm_config
    is_async = config.scheduler_config.async_scheduling
    return getattr(config, "max_concurrent_batches", max(config.parallel_config.pipeline_parallel_size, 1 + is_async))


def unserved_features(scheduler: Scheduler, is_ours: bool) -> dict[str, Any]:
    """Features of some releases that rows do not serve, each with whether the scheduler has it.

    ``is_ours`` says that the runner is this library's, which reads no list of cache blocks to be zeroed.
    """
    config, manager = scheduler.vllm_config, scheduler.kv_cache_manager
    hash_block_size = getattr(scheduler, "hash_block_size", scheduler.block_size)
    return {
        "routed experts in outputs": getattr(config.model_config, "enable_return_routed_experts", False),
        "vLLM's second model runner": scheduler.use_v2_model_runner and not DROPS_STALE_OUTPUTS,
        "auxiliary outputs": getattr(scheduler, "aux_output_connector", None),
        "sampling masks in outputs": getattr(scheduler, "return_sampling_mask", False),
        "a watermark of cache blocks": getattr(manager, "watermark_blocks", 0),
        "prompts that wait some steps": getattr(scheduler, "local_prefill_interval", 1) > 1,
        "cache blocks that are zeroed": getattr(scheduler, "needs_kv_cache_zeroing", False) and not is_ours,
        "details of each step in the log": getattr(
            config.observability_config, "enable_logging_iteration_details", False
        ),
        "blocks that are hashed in parts": hash_block_size != scheduler.block_size,
    }


def ends_failed_grammars(scheduler: Scheduler) -> bool:
    """Whether vLLM itself ends a request whose grammar does not compile."""
    return hasattr(scheduler, "grammar_compile_error_reqs")


def is_paused(scheduler: Scheduler) -> bool:
    """Whether requests are held back until the engine goes on."""
    return bool(getattr(scheduler, "pause_state", 0))


def is_stopped(scheduler: Scheduler) -> bool:
    """Whether no request is scheduled until the engine goes on, not even one that has cache blocks."""
    state = getattr(scheduler, "pause_state", None)
    return state is not None and state == type(state).PAUSED_ALL


def holds_waiting(scheduler: Scheduler) -> bool:
    """Whether a request waits, with or without cache blocks."""
    return bool(scheduler.waiting or getattr(scheduler, "kv_holding_waiting", ()))


def waiting_requests(scheduler: Scheduler) -> list[Request]:
    """Requests that wait, with or without cache blocks, in the order in which they are scheduled."""
    return [*getattr(scheduler, "kv_holding_waiting", ()), *scheduler.waiting]


def queue_without_blocks(scheduler: Scheduler) -> bool:
    """Moves requests that have lost their cache blocks out of the queue of those that have some; whether there are any.

    Newer releases keep blocks free for every request in that queue, also for the one that asks for them.
    """
    holding: Any = getattr(scheduler, "kv_holding_waiting", ())
    ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    without = [each for each in holding if each.status in ready and not each.num_computed_tokens]
    if without:
        holding.remove_requests(without)
        for request in reversed(without):
            scheduler.waiting.prepend_request(request)
    return bool(without)


def has_ended_requests(scheduler: Scheduler) -> bool:
    """Whether requests have ended with an error since the last step, which the next output reports."""
    return bool(
        getattr(scheduler, "grammar_compile_error_reqs", ()) or getattr(scheduler, "encoder_cache_mismatch_reqs", ())
    )


def take_preempted(scheduler: Scheduler) -> set[str]:
    """Ids of the requests that were preempted between two steps, which the next step names."""
    taken: set[str] = getattr(scheduler, "reset_preempted_req_ids", set())
    scheduler.reset_preempted_req_ids = set()  # type: ignore[attr-defined]
    return taken


def common_prefix(scheduler: Scheduler, req_id: str) -> list[int]:
    """Number of blocks by group that all running requests share; empty in releases that no longer use it.

    ``req_id`` is one of them.
    """
    if DROPS_STALE_OUTPUTS:
        return []
    return scheduler.kv_cache_manager.get_num_common_prefix_blocks(req_id)


# ---- Steps that a KV connector follows ----


def number_step(scheduler: Any, is_counted: bool) -> int:
    """Number of the step with tokens that has just been scheduled, where freed blocks wait for steps in flight; else 0.

    ``is_counted`` says whether vLLM's own code has counted it already.
    """
    if not getattr(scheduler, "defer_block_free", False):
        return 0
    if not is_counted:
        scheduler.sched_step_seq += 1
    return scheduler.sched_step_seq


def count_step(request: Any, num_placeholders: int, step: int) -> None:
    """Counts a step of a decoding request as vLLM's own code does, with the step's number (``number_step``)."""
    request.num_computed_tokens += 1
    request.num_output_placeholders += num_placeholders
    if hasattr(request, "num_in_flight_tokens"):
        request.num_in_flight_tokens += 1
    if step:
        request.last_sched_seq = step


def count_read(scheduler: Any) -> None:
    """Counts a step that is read, and frees the blocks that waited for it, as vLLM does where loads may overtake
    steps."""
    if getattr(scheduler, "defer_block_free", False):
        scheduler.processed_step_seq += 1
        scheduler._drain_deferred_frees()
        scheduler._drain_deferred_loads()


def is_asked_each_step(connector: Any) -> bool:
    """Whether a KV connector has figures or events that vLLM takes with the output of each step."""
    methods = connector.get_kv_connector_stats, connector.take_events
    empty = KVConnectorBase_V1.get_kv_connector_stats, KVConnectorBase_V1.take_events
    return [getattr(method, "__func__", None) for method in methods] != [*empty]


def show_to_connector(scheduler: Any, step: Any) -> None:
    """Lets the scheduler's KV connector make its metadata for a step that vLLM's own code has not made."""
    has_state = "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__
    if has_state:
        make_state: Any = step_output.KVConnectorBlockState  # type: ignore[attr-defined]
        step.kv_connector_block_state = make_state(
            set(step.num_scheduled_tokens), scheduler.kv_cache_manager.get_block_ids, {}
        )
    step.kv_connector_metadata = scheduler.connector.build_connector_meta(step)
    if has_state:
        step.kv_connector_block_state = None


def show_blocks(step: Any, req_ids: list[str]) -> None:
    """Adds requests to those of which a KV connector may read the blocks while a step is made."""
    if (state := getattr(step, "kv_connector_block_state", None)) is not None:
        state.req_ids.update(req_ids)


def failed_loads(transfers: Any) -> bool:
    """Whether a KV connector's output names blocks or requests that were not loaded."""
    return bool(transfers.invalid_block_ids or getattr(transfers, "failed_recving", None))


def advance_grammar(manager: Any, request: Request, token_ids: list[int]) -> bool | None:
    """Advances the request's grammar by its tokens. Returns whether the grammar accepts them; None if not asked.

    Newer releases end a request whose grammar does not.
    """
    if hasattr(manager, "accept_tokens"):
        return manager.accept_tokens(request, token_ids)
    if not manager.should_advance(request):
        return None
    structured = request.structured_output_request
    assert structured is not None and structured.grammar is not None
    return structured.grammar.accept_tokens(request.request_id, token_ids)
