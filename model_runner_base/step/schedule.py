"""Step as the scheduler asks for it: vLLM's ``SchedulerOutput`` is read into a ``Schedule``, and its ``GrammarOutput``
into a ``Grammar``.

Example: "a" decodes and enters a new cache block, "b" decodes, "c" arrives with a prompt of 5 tokens:

    Schedule(finished=set(), preempted=(),
             arrivals=[Arrival("c", [5 token ids], num_computed=0, block_ids=([7],), params=...)],
             continued=["a", "b"], new_blocks=[([12],), None],
             num_tokens={"a": 1, "b": 1, "c": 5}, total_num_tokens=7)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput

from model_runner_base.step.request_states import RequestInfo
from model_runner_base.vllm_compat.types.mixed_prompts import ids_of_tokens, mark_tokens

__all__ = ["Arrival", "Grammar", "GrammarOutput", "Schedule", "SchedulerOutput", "read_grammar", "read_schedule"]


@dataclass(slots=True)
class Arrival:
    """A request that needs a row: a new one, or one that resumes after a preemption."""

    req_id: str
    token_ids: list[int]
    """The prompt; of a request that resumes, also its output so far."""
    num_computed: int
    """Number of tokens that lie in the cache already."""
    block_ids: tuple[list[int], ...]
    """Blocks of the request, one list for each KV-cache group."""
    params: SamplingParams | PoolingParams | None = None
    """Parameters of a new request, for the head; None for one that resumes."""
    prompt_embeds: torch.Tensor | None = None
    """[prompt, hidden] on the host, of a new request whose prompt is embeddings; its ``token_ids`` are zeros then. A
    row of NaN is a token, which has an id (``vllm_compat/types/mixed_prompts.py``)."""
    adapter: LoRARequest | None = None
    """Adapter that a new request names, if any."""
    items: Sequence[MultiModalFeatureSpec] = ()
    """Images and other items in the prompt of a new request, with their positions."""

    def resumes(self, info: RequestInfo) -> bool:
        """Whether the request of ``info`` resumes as it was; if not, a session goes on with a longer prompt.

        A request that was preempted before its first token may arrive as if it were new, with the same prompt.
        """
        is_same = self.params == info.params and len(self.token_ids) == info.num_prompt_tokens
        return self.params is None or is_same


@dataclass(slots=True)
class Schedule:
    """One step as the scheduler wants it. The lists are the scheduler's own, and do not change."""

    finished: Collection[str]
    preempted: Collection[str]
    arrivals: list[Arrival]
    continued: Sequence[str]
    """Requests that were scheduled in an earlier step, also those that resume, in the scheduler's order."""
    new_blocks: Sequence[tuple[list[int], ...] | None]
    """Blocks to append for each of ``continued``, a list for each group; None for a request that gets none or
    resumes."""
    num_tokens: Mapping[str, int]
    """Number of tokens to run for every request of this step, in the scheduler's order."""
    total_num_tokens: int
    num_computed: Sequence[int] = ()
    """Number of tokens in the cache for each of ``continued``, if every draft that was scheduled is right. It is exact
    where the scheduler has read the results of all earlier steps."""
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Drafts to verify, by request, which ``num_tokens`` includes; -1 for a draft that only the device knows."""
    encoder_inputs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Items to encode before the step, by request: indices among its ``items``."""
    freed_items: Sequence[str] = ()
    """Identifiers of items whose encoder outputs are freed, before others are encoded."""
    failed_items: Sequence[MultiModalFeatureSpec] = ()
    """Items of requests that failed. They are encoded, since other requests may share them."""
    connector_metadata: Any = None
    """Message of the scheduler's half of a KV connector to the worker's half; None without a connector."""


class Grammar(NamedTuple):
    """The tokens that structured output allows next."""

    req_ids: Sequence[str]
    bitmask: np.ndarray
    """[rows, ceil(V / 32)] int32: token t at bit t % 32 of word t // 32. Each request has a row for its next token, and
    one for the token after each of its drafts."""

    def at(self, place: np.ndarray, decode_query_len: int) -> np.ndarray:
        """[N, ceil(V / 32)] rows of the bitmask for N sampled tokens.

        ``place`` [N] counts the tokens of each request from 0 on: 0 1 2 0 0 1 are three requests. If the bitmask has
        more than N rows, each request has ``decode_query_len`` of them, and rows of missing drafts are left out.
        """
        if len(self.bitmask) == len(place):
            return self.bitmask
        if len(self.bitmask) != len(self.req_ids) * decode_query_len:
            raise RuntimeError("structured output: it is not known which drafts the bitmask's rows belong to")
        owner = (place == 0).cumsum() - 1
        return self.bitmask[owner * decode_query_len + place]


# ---- Reading what vLLM sends ----


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
