"""Reads vLLM's ``SchedulerOutput`` into a ``Schedule``, and its ``GrammarOutput`` into a ``Grammar``."""

from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput

from model_runner_base.step.schedule import Arrival, Grammar, Schedule
from model_runner_base.vllm_compat.types.mixed_prompts import ids_of_tokens, mark_tokens

__all__ = ["GrammarOutput", "SchedulerOutput", "read_grammar", "read_schedule"]


def read_schedule(scheduler_output: SchedulerOutput) -> Schedule:
    """Reads a step. Its lists are shared, so this takes no time that grows with the requests."""
    cached = scheduler_output.scheduled_cached_reqs
    arrivals: list[Arrival] = []
    new_blocks = cached.new_block_ids
    if cached.resumed_req_ids:
        arrivals, new_blocks = _resumed(cached)
    if scheduler_output.scheduled_new_reqs:
        arrivals += [_arrival(new) for new in scheduler_output.scheduled_new_reqs]
    schedule = Schedule(
        scheduler_output.finished_req_ids,
        scheduler_output.preempted_req_ids or (),
        arrivals,
        cached.req_ids,
        new_blocks,
        scheduler_output.num_scheduled_tokens,
        scheduler_output.total_num_scheduled_tokens,
        cached.num_computed_tokens,
        scheduler_output.scheduled_spec_decode_tokens,
        scheduler_output.scheduled_encoder_inputs,
        scheduler_output.free_encoder_mm_hashes,
        connector_metadata=scheduler_output.kv_connector_metadata,
    )
    if arrivals and schedule.drafts:
        _leave_out_padding(schedule)
    return schedule


def _leave_out_padding(schedule: Schedule) -> None:
    """Removes places for drafts from requests that arrive.

    A request that arrives with one token may have such places, so that all requests of a step are alike, but there are
    no drafts for it. Places that are not run count as wrong drafts.
    """
    padded = [arrival.req_id for arrival in schedule.arrivals if arrival.req_id in schedule.drafts]
    if padded:
        drafts, num_tokens = dict(schedule.drafts), dict(schedule.num_tokens)
        for req_id in padded:
            count = len(drafts.pop(req_id))
            num_tokens[req_id] -= count
            schedule.total_num_tokens -= count
        schedule.drafts, schedule.num_tokens = drafts, num_tokens


def _arrival(new: NewRequestData) -> Arrival:
    """Reads a request that the scheduler calls new.

    If it takes the worker for vLLM's second model runner (``VLLM_USE_V2_MODEL_RUNNER``), it also calls requests new
    that resume, and sends all their tokens.
    """
    token_ids = new.prompt_token_ids
    if token_ids is None:
        assert new.prompt_embeds is not None
        token_ids = [0] * len(new.prompt_embeds)
    embeds, is_token = new.prompt_embeds, getattr(new, "prompt_is_token_ids", None)
    if is_token is not None:
        assert embeds is not None
        embeds, token_ids = mark_tokens(embeds, is_token), ids_of_tokens(token_ids, is_token)
    known = new.prefill_token_ids
    if known is not None and len(known) > len(token_ids):
        return Arrival(new.req_id, known, new.num_computed_tokens, new.block_ids)
    return Arrival(
        new.req_id,
        token_ids,
        new.num_computed_tokens,
        new.block_ids,
        new.pooling_params if new.sampling_params is None else new.sampling_params,
        embeds,
        new.lora_request,
        new.mm_features,
    )


def _resumed(cached: CachedRequestData) -> tuple[list[Arrival], list[tuple[list[int], ...] | None]]:
    """Reads the requests that resume; also returns the new blocks of all requests, None for those that resume."""
    arrivals, new_blocks = [], cached.new_block_ids.copy()
    for index, req_id in enumerate(cached.req_ids):
        if req_id in cached.resumed_req_ids:
            block_ids, new_blocks[index] = new_blocks[index], None
            assert block_ids is not None
            token_ids, num_computed = cached.all_token_ids[req_id], cached.num_computed_tokens[index]
            arrivals.append(Arrival(req_id, token_ids, num_computed, block_ids))
    return arrivals, new_blocks


def read_grammar(grammar_output: GrammarOutput | None) -> Grammar | None:
    """Reads which tokens structured output allows in a step; the bitmask is shared."""
    if grammar_output is None:
        return None
    return Grammar(grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask)
