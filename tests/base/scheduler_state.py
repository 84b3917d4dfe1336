"""State in which two schedulers agree: what they ask of a runner, tell a front end, and keep of requests and blocks."""

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


def same(stock: Any, ours: Any, what: str) -> None:
    if stock != ours:
        assert isinstance(stock, dict) and isinstance(ours, dict), f"{what}: {ours}, but vLLM has {stock}"
        for name in stock.keys() | ours.keys():
            assert stock.get(name) == ours.get(name), (
                f"{what}, {name}: {ours.get(name)}, but vLLM has {stock.get(name)}"
            )


def told(output: SchedulerOutput) -> dict[str, Any]:
    """Fields of a step, as the runner is told them."""
    if hasattr(output, "new_block_ids_to_zero"):
        output.new_block_ids_to_zero = None  # For models with states. This library's runner does not read it.
    return {
        each.name: [asdict_plain(new) for new in value] if each.name == "scheduled_new_reqs" else plain(value)
        for each in fields(output)
        for value in [getattr(output, each.name)]
    }


def plain(value: Any) -> Any:
    return dict(vars(value)) if hasattr(value, "req_ids") else value


def asdict_plain(new: Any) -> dict[str, Any]:
    return {name: str(value) if name == "sampling_params" else value for name, value in vars(new).items()}


def asked(outputs: Any) -> Any:
    """Fields of an EngineCoreOutputs. Times differ, so events are given without them."""
    listed = []
    for output in outputs.outputs:
        values = {name: getattr(output, name) for name in output.__struct_fields__}
        values["events"] = output.events and [event.type for event in output.events]
        if output.new_logprobs is not None:
            values["new_logprobs"] = [part.tolist() for part in output.new_logprobs if part is not None]
        listed.append(values)
    stats = outputs.scheduler_stats
    return listed, outputs.finished_requests, stats and asdict(stats)


STATE = (  # Not every release has all.
    "status",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_in_flight_tokens",
    "num_stale_output_tokens",
    "drop_stale_output",
    "discard_latest_async_tokens",
    "spec_token_ids",
    "last_sched_seq",
    "num_cached_tokens",
    "num_external_computed_tokens",
    "is_prefill_chunk",
    "num_preemptions",
    "num_nans_in_logits",
    "stop_reason",
    "block_hashes",
    "num_prompt_tokens",
    "num_tokens",
    "num_output_tokens",
    "prompt_token_ids",
    "resumable",
)


def state_of(request: Request) -> dict[str, Any]:
    state = {name: getattr(request, name, None) for name in STATE}
    structured = request.structured_output_request
    return state | {
        "all tokens": request.all_token_ids.copy(),
        "output": request.output_token_ids.copy(),
        "events": [event.type for event in request.events],
        "queue": request.streaming_queue and len(request.streaming_queue),
        "accepted": structured and structured.grammar.accepted,  # type: ignore[union-attr]
    }


def caches_of(scheduler: Any) -> dict[str, Any]:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    pool = scheduler.kv_cache_manager.block_pool
    cached = pool.cached_block_hash_to_block._cache
    return {
        "tables": [
            {req_id: ids(blocks) for req_id, blocks in each.req_to_blocks.items() if blocks} for each in managers
        ],
        "cached of each": [each.num_cached_block for each in managers],
        "free": ids(pool.free_block_queue.get_all_free_blocks()),
        "number free": pool.get_num_free_blocks(),
        "blocks": [(block.ref_cnt, block.block_hash, block.is_null) for block in pool.blocks],
        # A hash of one block and one of several that has one left read the same.
        "by hash": {key: list(value) if isinstance(value, dict) else [value.block_id] for key, value in cached.items()},
    }


def ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]
