"""A ``SchedulerOutput`` made by hand, for checks that schedule themselves in ways that vLLM's scheduler seldom does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec


def frees_unseen_blocks(spec: object) -> bool:
    """Whether vLLM's scheduler gives back blocks of a group of this KV-cache spec that no later token sees."""
    return isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)


@dataclass
class Continued:
    """A request that was scheduled before, in the terms of vLLM's ``CachedRequestData``."""

    req_id: str
    is_resumed: bool
    all_token_ids: list[int] | None
    """Token ids of the request, if it was not in the last step; None if it was."""
    new_block_ids: tuple[list[int], ...] | None
    num_computed: int
    num_output_tokens: int


@dataclass
class HandMadeStep:
    """Collects the requests of a step."""

    new: list[NewRequestData] = field(default_factory=list)
    continued: list[Continued] = field(default_factory=list)

    def add_new(
        self,
        req_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        block_ids: Sequence[list[int]],
        num_computed: int,
    ) -> None:
        self.new.append(
            NewRequestData(
                req_id=req_id,
                prompt_token_ids=prompt_token_ids,
                mm_features=[],
                sampling_params=params,
                pooling_params=None,
                block_ids=tuple(block_ids),
                num_computed_tokens=num_computed,
                lora_request=None,
            )
        )

    def scheduler_output(
        self, num_tokens: Mapping[str, int], finished: set[str], preempted: set[str], num_groups: int
    ) -> SchedulerOutput:
        """The collected step as vLLM's scheduler would hand it over."""
        cached = CachedRequestData(
            req_ids=[each.req_id for each in self.continued],
            resumed_req_ids={each.req_id for each in self.continued if each.is_resumed},
            new_token_ids=[],
            all_token_ids={
                each.req_id: each.all_token_ids for each in self.continued if each.all_token_ids is not None
            },
            new_block_ids=[each.new_block_ids for each in self.continued],
            num_computed_tokens=[each.num_computed for each in self.continued],
            num_output_tokens=[each.num_output_tokens for each in self.continued],
        )
        return SchedulerOutput(
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict(num_tokens),
            total_num_scheduled_tokens=sum(num_tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0] * num_groups,
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
        )
