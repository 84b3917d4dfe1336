"""Wiring of the step from its parts, in the order of start-up: the one place that shows which part gets what."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.forward_context import ForwardContext, create_forward_context

from model_runner_base.caches.allocation import bind_kv_caches
from model_runner_base.caches.attention_groups import attention_groups
from model_runner_base.caches.contiguous import num_lines
from model_runner_base.caches.factory import make_layout
from model_runner_base.caches.group import AttentionGroup, CacheKind
from model_runner_base.caches.spans import BidirectionalSpans
from model_runner_base.device_ops import DeviceOps
from model_runner_base.draft.device import DraftParts
from model_runner_base.draft.drafter import Drafter
from model_runner_base.draft.factory import make_drafter
from model_runner_base.heads.factory import make_head
from model_runner_base.heads.generate import GenerateHead
from model_runner_base.heads.head import Head
from model_runner_base.heads.pipeline_stages import make_stage
from model_runner_base.heads.sampling.logits_processors import BatchProcessors
from model_runner_base.heads.sampling.logits_stage import CustomProcessors
from model_runner_base.heads.sampling.sampler import SamplingMode, Vocabulary
from model_runner_base.heads.sampling.slot_processors import SlotProcessors
from model_runner_base.inputs.adapters.adapters import Adapters
from model_runner_base.inputs.embeddings import make_embedding_inputs
from model_runner_base.inputs.multimodal.encoder import Encoder, LayerCaches
from model_runner_base.inputs.tokens import TokenInputs
from model_runner_base.models.draft_loading import draft_of
from model_runner_base.models.layers.expert_exchange import expert_replicas
from model_runner_base.runner.background import BackgroundCompiler
from model_runner_base.runner.kv_transfer import ConnectedCaches, transfer_components
from model_runner_base.runner.model_graph import ModelGraph
from model_runner_base.runner.state_updates import StateUpdates
from model_runner_base.step.batch import BatchBuilder
from model_runner_base.step.components import StepComponents
from model_runner_base.step.graph_policy import GraphPolicy, GraphState, HeldTensors, SizeDoor, StepFunction
from model_runner_base.step.guard import StepGuard
from model_runner_base.step.packing import Packer
from model_runner_base.step.repeat import Repeat, make_repeat
from model_runner_base.step.request_failures import RequestErrors
from model_runner_base.step.request_states import BlockTable, DeviceRows, RequestStates
from model_runner_base.step.sizes import StepLimits
from model_runner_base.step.token_layout import TokenLayout
from model_runner_base.vllm_compat.probes.config import uses_slot_processors
from model_runner_base.vllm_compat.probes.processors import has_custom_processors
from model_runner_base.vllm_compat.types.kv_cache import CacheLayout
from model_runner_base.vllm_compat.types.kv_connector import WorkerConnector
from model_runner_base.vllm_compat.types.speculation import read_speculation


class Runner(Protocol):
    """Interface of a runner before its first step; ``parts`` are there once ``wire`` has made them."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    max_model_len: int
    model: Any
    vocabulary: Vocabulary
    adapters: Adapters
    encoder: Encoder
    connector: WorkerConnector | None
    logits_processors: CustomProcessors
    errors: RequestErrors
    step_guard: StepGuard
    background_compiler: BackgroundCompiler
    parts: "StepParts"
    pending: Any
    KV_TILE: int
    CHUNK_KV_TILE: int

    @property
    def device_ops(self) -> DeviceOps: ...

    @property
    def graph_policy(self) -> GraphPolicy: ...

    @property
    def use_piecewise_graph(self) -> bool: ...

    def step_limits(self, num_lines: int = 0) -> StepLimits: ...

    def make_kv_caches(self, layout: CacheLayout) -> tuple[list[torch.Tensor], dict[str, tuple[int, ...]]]: ...

    def make_caches(
        self, groups: list[AttentionGroup], limits: StepLimits, spans: BidirectionalSpans
    ) -> list[CacheKind]: ...

    def make_sampler(self, mode: SamplingMode) -> StepFunction: ...


@dataclass
class StepParts:
    """Parts of the step, as ``wire`` makes them."""

    requests: RequestStates
    block_tables: list[BlockTable]
    rows: DeviceRows
    kv_caches: HeldTensors
    bind_kv_caches: Callable[[], None]
    """Function that points the layers at the caches."""
    layout: TokenLayout
    caches: list[CacheKind]
    components: StepComponents
    updates: StateUpdates
    batches: BatchBuilder
    repeat: Repeat
    forward_context: ForwardContext
    """Context of all steps, which holds a step's attention metadata while the model runs."""
    head: Head
    drafter: Drafter
    graph: ModelGraph


def wire(runner: Runner, layout: CacheLayout) -> StepParts:
    """Makes and connects all parts of the step of ``runner``, whose model is loaded."""
    config, device_ops, policy = runner.vllm_config, runner.device_ops, runner.graph_policy
    max_num_reqs, max_model_len = config.scheduler_config.max_num_seqs, runner.max_model_len

    # Requests: rows on the host, rows on the device, cache blocks.
    requests = RequestStates(max_num_reqs, max_model_len)
    speculation = read_speculation(config)
    rows = DeviceRows(max_num_reqs, device_ops, 1 + speculation.num_drafts)
    tiles = runner.KV_TILE, runner.CHUNK_KV_TILE
    block_tables, groups = attention_groups(layout, config, max_num_reqs, max_model_len, tiles)

    # State that graphs update.
    state = GraphState()
    tensors, index_of = runner.make_kv_caches(layout)
    kv_caches = state.hold(tensors)
    rows.tensors = state.hold(rows.tensors)
    bind_caches = partial(bind_kv_caches, kv_caches, index_of, config)
    bind_caches()

    # The stage of a pipeline that this rank is, if there are several; the model's head is that of the last one.
    stage = make_stage(config, runner.model, rows, policy.wrap, device_ops)
    runner.step_guard.explain = stage.explain

    # The head, which turns the model's hidden states into tokens or vectors.
    generating = partial(
        GenerateHead,
        config,
        runner.model,
        runner.vocabulary,
        runner.logits_processors,
        runner.make_sampler,
        runner.adapters,
        requests,
        rows,
        policy,
        device_ops,
    )
    head = stage.head or make_head(config.model_config, runner.model, requests, device_ops, generating)

    # What a step sends: sizes, caches, inputs.
    reads_lines = all(group.reads_lines for group in groups) and not speculation.num_drafts
    limits = runner.step_limits(num_lines(layout, config) if reads_lines else 0)
    policy.configure(limits)
    caches = runner.make_caches(groups, limits, runner.encoder.spans(requests))
    block_tables += [table for kind in caches for table in kind.tables]
    token_layout = make_layout(caches, limits)
    max_num_tokens = config.scheduler_config.max_num_batched_tokens
    runner.encoder.connect(requests, LayerCaches(groups, kv_caches, index_of))
    components = StepComponents(
        [
            runner.errors,
            TokenInputs(requests),
            *stage.components,
            *head.components(),
            # Adapters come before components that look embeddings up, and the layout before those that read positions.
            *runner.adapters.components(requests),
            token_layout,
            *caches,
            *make_embedding_inputs(
                config.model_config, requests, max_num_tokens, runner.model, policy.wrap, device_ops
            ),
            *runner.encoder.components(requests),
        ]
    )

    # The drafter, which guesses the next tokens.
    forward_context = create_forward_context(None, config)
    draft_parts = None
    if speculation.num_drafts:
        assert isinstance(head, GenerateHead)
        draft_parts = DraftParts(
            model=draft_of(runner.model),
            layout=token_layout,
            caches=caches,
            components=components,
            rows=rows,
            tables=head.tables,
            num_drafts=speculation.num_drafts,
            mask_token=speculation.mask_token or 0,
            max_length=min(max_model_len, speculation.max_length),
            is_async=speculation.is_async,
            sort_limits=policy.sort_limits,
            wrap=policy.wrap,
            state=state.tensors,
            forward_context=forward_context,
            device_ops=device_ops,
        )
    drafter = make_drafter(speculation, requests, draft_parts)
    components.add(drafter)

    # The model's graph, which runs on the device.
    agree, agrees = SizeDoor(policy.agree), type(policy).agree is not GraphPolicy.agree
    repeat = make_repeat(requests, agree, agrees, num_in_flight=stage.count)
    graph = ModelGraph(
        runner.model,
        token_layout,
        components,
        head,
        drafter,
        rows,
        repeat,
        Packer(components.checked_sections, device_ops),
        agree,
        forward_context,
        partial(policy.wrap, state=kv_caches),
        bind_caches,
    )

    # The states that a schedule updates.
    updates = StateUpdates(
        requests, block_tables, head, components, runner.adapters, runner.encoder, repeat, runner.errors
    )
    # After the drafter, whose passes write keys and values, too.
    connected = ConnectedCaches(layout, groups, kv_caches, index_of, policy, device_ops)
    has_drafts = speculation.num_drafts > 0
    for component in [
        *expert_replicas(runner.model, lambda: graph.dummy_run(policy.dispatch(limits.smallest_size))),
        *transfer_components(runner.connector, connected, updates, forward_context, has_drafts),
    ]:
        components.add(component)
    order = token_layout.order._replace(prompts_in_chunks=components.prompts_in_chunks)
    return StepParts(
        requests=requests,
        block_tables=block_tables,
        rows=rows,
        kv_caches=kv_caches,
        bind_kv_caches=bind_caches,
        layout=token_layout,
        caches=caches,
        components=components,
        updates=updates,
        batches=BatchBuilder(requests, order),
        repeat=repeat,
        forward_context=forward_context,
        head=head,
        drafter=drafter,
        graph=graph,
    )


def load_processors(vllm_config: VllmConfig, device: torch.device) -> CustomProcessors:
    """Loads the custom logits processors of a user and of plugins, which run on ``device``.

    Raises what vLLM raises if one cannot be loaded.
    """
    if uses_slot_processors(vllm_config) and has_custom_processors(vllm_config):
        return SlotProcessors(vllm_config, device)
    return BatchProcessors(vllm_config, device)
