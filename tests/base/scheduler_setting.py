"""Schedulers for tests, vLLM's own and ours, and requests for them: made once for each scheduler."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from conftest import BUNDLED_MODEL
from vllm import SamplingParams
from vllm.config import KVTransferConfig, LoRAConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from benchmarks.harness.releases import new_request, one_cache
from model_runner_base.scheduling import AsyncRowScheduler, RowScheduler
from model_runner_base.scheduling.corrections.preempted_steps import PreemptedSteps
from model_runner_base.scheduling.releases import DROPS_STALE_OUTPUTS
from model_runner_base.scheduling.scheduler import Corrections, Turns
from model_runner_base.scheduling.state_group import GROUP, state_spec

BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
EOS = 7
VOCAB_SIZE = 40
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)

init_none_hash(sha256)


def window_spec(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
    )


@dataclass(frozen=True)
class Setting:
    """Options that the engine is started with."""

    is_async: bool = True
    caching: bool = True
    policy: str = "fcfs"
    log_stats: bool = True
    num_blocks: int = 200
    max_num_seqs: int = 24
    max_num_batched_tokens: int = 64
    long_prefill_token_threshold: int = 0
    include_finished_set: bool = False
    depth: int = 2
    """Steps in flight, where scheduling is asynchronous; vLLM's engine has two."""
    is_second_contract: bool = False
    """Whether steps are sent as vLLM's second model runner reads them; rows have them on newer releases only."""
    has_states: bool = False
    """Whether the model has recurrent layers, too, and so a second group."""
    connector: tuple[str, ...] | None = None
    """Options of a ``NotingConnector`` that are on, or of a ``QuietConnector``; None: there is no connector."""
    windows: tuple[int, ...] = ()
    """Windows of further groups, in tokens."""
    max_loras: int = 0
    """Number of adapters that a step may have; 0: requests have no adapters."""
    load_failures: str = "recompute"
    """The policy for blocks that a connector does not load."""


@cache
def config_of(setting: Setting) -> VllmConfig:
    config = EngineArgs(
        str(BUNDLED_MODEL),
        skip_tokenizer_init=True,
        hf_overrides={"max_position_embeddings": MAX_MODEL_LEN},
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=max(setting.max_num_batched_tokens, setting.max_num_seqs),
        block_size=BLOCK_SIZE,  # type: ignore[arg-type]
        enable_prefix_caching=setting.caching,
        async_scheduling=setting.is_async,
        scheduling_policy=setting.policy,  # type: ignore[arg-type]
        long_prefill_token_threshold=setting.long_prefill_token_threshold,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = setting.num_blocks
    if setting.max_loras:
        config.lora_config = LoRAConfig(max_loras=setting.max_loras)
    if setting.connector is not None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="QuietConnector" if "quiet" in setting.connector else "NotingConnector",
            kv_connector_module_path="noting_connector",
            kv_role="kv_both",
            kv_load_failure_policy=setting.load_failures,  # type: ignore[arg-type]
            kv_connector_extra_config=dict.fromkeys(setting.connector, True),
        )
    return config


class Grammar:
    """Remembers what it accepts."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_tokens(self, req_id: str, token_ids: list[int]) -> bool:
        """Accepts all tokens but one in forty, which newer releases end a request for."""
        self.accepted += token_ids
        return not DROPS_STALE_OUTPUTS or 13 not in token_ids


class GrammarManager:
    """The part of vLLM's StructuredOutputManager that a scheduler asks. A bitmask is the data it would be made from."""

    def should_advance(self, request: Request) -> bool:
        return request.use_structured_output

    def accept_tokens(self, request: Request, token_ids: list[int]) -> bool:
        """Advances a request's grammar, which newer releases ask the manager to do."""
        if request.structured_output_request is None:
            return True
        return request.structured_output_request.grammar.accept_tokens(request.request_id, token_ids)  # type: ignore

    def grammar_bitmask(self, requests: dict[str, Request], req_ids: list[str], _: Any) -> Any:
        states = []
        for req_id in req_ids:
            structured = requests[req_id].structured_output_request
            assert structured is not None
            states.append((req_id, len(structured.grammar.accepted)))  # type: ignore[union-attr]
        return states


class SyncTurns(PreemptedSteps, Turns, Scheduler):
    """vLLM's own scheduler, corrected for sessions, forced resets, finished grammars and priorities.

    Some of these break it.
    """


class AsyncTurns(PreemptedSteps, Turns, AsyncScheduler):
    pass


class SyncCorrected(Corrections, Scheduler):
    """vLLM's own scheduler with all corrections, as it is without rows."""


class AsyncCorrected(Corrections, AsyncScheduler):
    pass


class EagerRows(RowScheduler):
    """Row scheduler that keeps rows for a single request, too."""

    least_rows = 1


class EagerAsyncRows(AsyncRowScheduler):
    least_rows = 1


def make(cls: type[Scheduler], setting: Setting) -> Any:
    config = config_of(setting)
    layers = [f"layer {index}" for index in range(2)]
    caches = one_cache(layers, SPEC, setting.num_blocks)
    for index, window in enumerate(setting.windows):
        caches.kv_cache_groups.append(KVCacheGroupSpec([f"window {index}"], window_spec(window)))
    if setting.has_states:
        caches.kv_cache_groups.append(KVCacheGroupSpec([GROUP], state_spec(MAX_MODEL_LEN, setting.max_num_seqs)))
    scheduler = cls(
        config,
        caches,
        GrammarManager(),  # type: ignore[arg-type]
        BLOCK_SIZE,
        log_stats=setting.log_stats,
        include_finished_set=setting.include_finished_set,
    )
    scheduler.max_num_scheduled_tokens = setting.max_num_batched_tokens
    scheduler.use_v2_model_runner = setting.is_second_contract
    return scheduler


@dataclass
class Asked:
    """A request before it is made, once for each scheduler."""

    req_id: str
    prompt: list[int]
    params: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    is_structured: bool = False

    def make(self) -> Request:
        more = {"structured_outputs": StructuredOutputsParams(regex="a*")} if self.is_structured else {}
        params, hasher = SamplingParams(**self.params, **more), get_request_block_hasher(BLOCK_SIZE, sha256)
        request = new_request(self.req_id, list(self.prompt), params, EOS, block_hasher=hasher, **self.options)
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = Grammar()  # type: ignore[assignment]
        return request
