"""Step as the scheduler asks for it, in types of this library.

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

from model_runner_base.step.request_states import RequestInfo


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
