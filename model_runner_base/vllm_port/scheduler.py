"""Whether vLLM's scheduler is one that ours was written beside. Platforms ask while vLLM's config is half loaded."""

FILLED = {
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
"""The fields of a step that our scheduler fills, or knows to be empty."""


def has_steps_of_rows() -> bool:
    """Whether a step has these fields alone. With others come states of a request that our rows do not know."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return set(SchedulerOutput.__dataclass_fields__) == FILLED
