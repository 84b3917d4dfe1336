"""ModelRunnerBase: one step of the engine, from the scheduler's output to sampled tokens.

What may never enter this file: a device's name, a branch on a feature, a formula of attention or sampling. Those live
in the rooms that this file calls, and a device plugs itself in through four hooks (``_cache_device_properties``,
``load_model``, ``profile_run``, ``capture_model``) and the two objects that the first of them may install.
"""

from collections.abc import Iterable
from functools import partial
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import create_forward_context, get_forward_context, override_forward_context
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from model_runner_base import kv_cache, limits
from model_runner_base.attention.adapter import AttentionAdapter, AttentionGroup
from model_runner_base.attention.builders import BuilderAttentionAdapter
from model_runner_base.attention.lines import ContiguousAdapter
from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.attention.plan import kv_tile_for
from model_runner_base.attention_metadata import PagedAttentionAdapter
from model_runner_base.batch_builder import BatchBuilder
from model_runner_base.device_ops import DeviceOps
from model_runner_base.graph_policy import GraphPolicy, GraphSize, StepFunction, StepLimits
from model_runner_base.input_batch import (
    InputBatch,
    PackedInputs,
    PackedStep,
    Section,
    in_order,
    token_sections,
    unpack,
)
from model_runner_base.loader import change_config, reload_checkpoint
from model_runner_base.outputs import SampledStep, StepOutput
from model_runner_base.prompt_embeds import make_prompt_embeds
from model_runner_base.request_states import RequestInfo, RequestStates
from model_runner_base.sample.logits_processors import load_processors
from model_runner_base.sample.logprobs import reads_processed
from model_runner_base.sample.params import SamplingMode
from model_runner_base.sample.pipeline import SamplingPipeline, SamplingPlan
from model_runner_base.sample.sampler import sample
from model_runner_base.sample.stage import SampleInputs
from model_runner_base.sample.vocabulary import WHOLE, Vocabulary
from model_runner_base.steady_decode import SteadyDecode
from model_runner_base.step_guard import StepGuard, guarded
from model_runner_base.warm_up import warm_up


class ModelRunnerBase:
    """A device's model runner, less what only the device knows."""

    use_piecewise_graph = False
    """Whether steps run as captured graphs; eager is the fallback."""

    MIXED_QUERY_TILE = 16
    """Query tokens in one attention tile of a step that mixes prefill and decode."""
    KV_TILE = 64
    """Cache positions that an attention KV tile has at most, unless a block has more.

    A request pays for whole tiles, so small ones suit short contexts; in plain torch long ones cost the same with 64
    and 256, while a kernel may want more at a time. A device sets both in ``_cache_device_properties``.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        limits.check_config(vllm_config)
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.device = device
        self.step_guard = StepGuard(vllm_config.parallel_config.rank)
        self.max_model_len = self.model_config.max_model_len
        self._reach: int | None = None
        """Tokens of a request that tables and graphs are made for; None before they are."""
        self.tokenwise_graph_batch_sizes: list[int] = []
        """Token counts that steps are padded to; empty when eager."""

        # Replaced by _cache_device_properties where the device asks for it.
        self.device_ops = DeviceOps(device)
        self.graph_policy = GraphPolicy()
        # And by load_model, where ranks share the vocabulary.
        self.vocabulary: Vocabulary = WHOLE

        self.model: Any
        self._inputs = PackedInputs(self._sections)
        self._steady: SteadyDecode | None = None
        """The last step, if one like it may follow."""
        self._sample_inputs: SampleInputs | None = None
        self._cache_device_properties()
        self._logits_processors = load_processors(vllm_config, self.device_ops.eager_device)

    # ---- The four hooks of a device ----

    def _cache_device_properties(self) -> None:
        """Called once, by the constructor: read what the device can do, install ``device_ops``, ``graph_policy``."""
        raise NotImplementedError

    def load_model(self) -> None:
        """Set ``self.model``, its weights on the device."""
        raise NotImplementedError

    def profile_run(self) -> int:
        """The device memory in bytes that the largest step needs beyond weights and KV cache."""
        raise NotImplementedError

    def capture_model(self) -> None:
        """Make every graph that a step may need; called once, after ``initialize_kv_cache``."""
        raise NotImplementedError

    # ---- Factories: a device with a component of its own returns it here; the defaults serve all others ----

    def _make_kv_caches(self, kv_cache_config: KVCacheConfig) -> tuple[list[torch.Tensor], dict[str, int]]:
        """The caches on the device, and the index of each attention layer's."""
        with self.device_ops.memory_pool("kv_cache"):
            return kv_cache.allocate(kv_cache_config, self.vllm_config, self.device_ops, self.KV_TILE)

    def _make_attention_adapter(self, groups: list[AttentionGroup], step_limits: StepLimits) -> AttentionAdapter:
        """The base's own plan where the platform chose the base's attention, else the backends' metadata builders."""
        if all(issubclass(group.backend, PagedAttentionBackend) for group in groups):
            return (ContiguousAdapter if step_limits.num_lines else PagedAttentionAdapter)(groups, step_limits)
        return BuilderAttentionAdapter(groups, step_limits, self.vllm_config, self.device_ops)

    def _make_sampler(self, mode: SamplingMode) -> StepFunction:
        """A function like ``sample`` without its first three parameters."""
        return partial(sample, mode, reads_processed(self.model_config.logprobs_mode), self.graph_policy.sort_limits)

    def _make_output(self, batch: InputBatch, sampled: SampledStep) -> AsyncModelRunnerOutput:
        """``batch`` is valid until the next step, which may move its arrays on: an output copies what it keeps."""
        return StepOutput(batch, sampled, self.device_ops)

    # ---- The engine's contract: before the first step ----

    def get_model(self) -> nn.Module:
        return self.model

    def update_config(self, overrides: dict[str, dict[str, Any]]) -> None:
        """``{"load_config": {field: value}}``: what a later ``reload_weights`` goes by."""
        change_config(self.vllm_config, overrides)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Overwrites the model's weights in place; arguments as ``loader.reload_checkpoint`` has them."""
        reload_checkpoint(self.model, self.vllm_config, *args, **kwargs)
        self.device_ops.synchronize()

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return kv_cache.collect_specs(self.vllm_config)

    def useful_cache_memory(self) -> float:
        """Bytes of KV cache beyond which more would lie idle."""
        return kv_cache.useful_memory(self.vllm_config, self.get_kv_cache_spec())

    def update_max_model_len(self, max_model_len: int) -> None:
        """The engine fitted the model length to the memory that is left, before the KV cache exists.

        Later it can only be lowered: block tables, plans and captured sizes reach as far as the caches were made for.
        """
        if self._reach is not None and max_model_len > self._reach:
            raise ValueError(
                f"max_model_len cannot grow to {max_model_len} once the KV cache is made for {self._reach}: "
                "start the engine with the larger one"
            )
        self.max_model_len = max_model_len

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates and binds the KV caches, and everything whose size depends on them."""
        max_num_reqs = self.scheduler_config.max_num_seqs
        self._reach = self.max_model_len
        self.kv_caches, self._kv_cache_index = self._make_kv_caches(kv_cache_config)
        self._bind_kv_caches()
        self.last_tokens = [self.device_ops.zeros((max_num_reqs + 1,), torch.int32)]

        self.requests = RequestStates(max_num_reqs, self.max_model_len)
        self.block_tables, groups = kv_cache.attention_groups(
            kv_cache_config, self.vllm_config, max_num_reqs, self.max_model_len, self.KV_TILE
        )
        # Kernels of a device's own read by the plan's pairs.
        by_lines = all(group.backend is PagedAttentionBackend for group in groups)
        step_limits = self._step_limits(kv_cache.num_lines(kv_cache_config, self.vllm_config) if by_lines else 0)
        self.graph_policy.configure(step_limits)
        self.tokenwise_graph_batch_sizes = sorted({size.num_tokens for size in self.graph_policy.sizes})
        self.attention = self._make_attention_adapter(groups, step_limits)
        self.batch_builder = BatchBuilder(self.requests, self.attention.decode_threshold)
        self.prompt_embeds = make_prompt_embeds(self.model_config, self.requests, self.device_ops)

        # One for all steps: a step's attention metadata is put into it while the model runs (see _run_model).
        self._forward_context = create_forward_context(None, self.vllm_config)
        wrap = self.graph_policy.wrap
        self._forward = wrap(self._run_model, self.kv_caches)
        samplers = {mode: wrap(self._make_sampler(mode), self.last_tokens) for mode in SamplingMode}
        compute_logits = wrap(self._compute_logits, [])
        self.sampling = SamplingPipeline(
            self.vllm_config,
            self._logits_processors,
            self.requests,
            samplers,
            compute_logits,
            self.last_tokens,
            wrap,
            self.graph_policy.sort_limits,
            self.vocabulary,
            self.device_ops,
        )

    def _bind_kv_caches(self) -> None:
        """Points the layers at the caches, for eager runs and for tracing; a compiled run goes by ``kv_caches``."""
        kv_cache.bind(self.kv_caches, self._kv_cache_index, self.vllm_config)

    def _step_limits(self, num_lines: int = 0) -> StepLimits:
        return StepLimits(
            max_num_tokens=self.scheduler_config.max_num_batched_tokens,
            max_num_reqs=self.scheduler_config.max_num_seqs,
            max_model_len=self.max_model_len,
            query_tile=self.MIXED_QUERY_TILE,
            kv_tile=kv_tile_for(self.vllm_config.cache_config.block_size, self.KV_TILE),
            num_lines=num_lines,
        )

    # ---- The engine's contract: one step ----

    @guarded
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None
    ) -> ModelRunnerOutput | None:
        """Launches the model on the scheduled tokens; ``sample_tokens`` follows unless there were none.

        Tensors would come from the stage before in a pipeline, which limits.py refuses.
        """
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._execute_encoder(scheduler_output)
        batch, packed = self._prepare_inputs(scheduler_output)
        embeds = self.prompt_embeds.tensors(batch, packed.size)
        with override_forward_context(self._forward_context):
            self.attention.prepare(batch, packed)
            outputs = self._forward(packed.size, packed.on_device, self.last_tokens[0], *embeds)
        self._sample_inputs = SampleInputs(batch, *outputs)
        return None

    @guarded
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Launches the sampler on what ``execute_model`` left."""
        inputs, self._sample_inputs = self._sample_inputs, None
        if inputs is None:
            return None  # execute_model failed; the engine raises its exception
        plan = self._prepare_sampling(inputs.batch)
        sampled = self.sampling.run(plan, inputs, grammar_output)
        output = self._make_output(inputs.batch, sampled)
        return output if self.scheduler_config.async_scheduling else output.get_output()

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Brings request states and block tables up to the scheduler's: finished, preempted, new, continued."""
        for req_id in scheduler_output.finished_req_ids:
            self.requests.remove(req_id)
            self.sampling.prompt_logprobs.remove(req_id)
        for req_id in scheduler_output.preempted_req_ids or ():
            self.requests.release_row(req_id)

        cached = scheduler_output.scheduled_cached_reqs
        arriving = [*cached.resumed_req_ids, *(new.req_id for new in scheduler_output.scheduled_new_reqs)]
        self.requests.make_room(arriving, scheduler_output.num_scheduled_tokens)
        for new in scheduler_output.scheduled_new_reqs:
            info = RequestInfo.of(new, self.sampling.draw_seed)
            if new.req_id not in self.requests.infos:  # Else a session goes on; its first prompt has had them.
                self.sampling.prompt_logprobs.add(new.req_id, info)
            self._place(new.req_id, info, info.prompt_token_ids, new.num_computed_tokens, new.block_ids)

        self._extend(cached)

    def _extend(self, cached: CachedRequestData) -> None:
        """Gives continued requests their new blocks, resumed ones their rows. In steady decode most have neither."""
        extended: list[Any] = cached.new_block_ids
        if resumed := cached.resumed_req_ids:
            extended = extended.copy()
            for index, req_id in enumerate(cached.req_ids):
                if req_id in resumed:
                    block_ids, extended[index] = extended[index], None
                    tokens, num_computed = cached.all_token_ids[req_id], cached.num_computed_tokens[index]
                    self._place(req_id, self.requests.infos[req_id], tokens, num_computed, block_ids)
        if any(extended):
            steady = self._steady
            # The last step's requests again: their rows are known, a look-up each would be most of the cost.
            if steady is not None and steady.batch.req_ids == cached.req_ids:
                rows = list(compress(steady.rows, extended))
            else:
                rows = [self.requests.rows[req_id] for req_id in compress(cached.req_ids, extended)]
            by_table = zip(*filter(None, extended), strict=True)
            for table, block_ids in zip(self.block_tables, by_table, strict=True):
                table.append(rows, block_ids)

    def _place(
        self, req_id: str, info: RequestInfo, token_ids: list[int], num_computed: int, block_ids: tuple[list[int], ...]
    ) -> None:
        """Gives a new or resumed request its row."""
        row = self.requests.add(req_id, info, token_ids, num_computed)
        self.sampling.set(row, info, token_ids)
        self.prompt_embeds.set(row, info)
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.assign(row, ids)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput) -> tuple[InputBatch, PackedStep]:
        """The batch; and the size it runs at with its arrays, padded to that size, in one buffer on the device."""
        steady = self._steady
        if steady is not None and steady.advance(scheduler_output):
            batch, packed = steady.batch, steady.packed
        else:
            batch = self.batch_builder.build(scheduler_output)
            packed = self._pack(batch)
        self.prompt_embeds.pack(batch, packed.views)
        packed.on_device = self.device_ops.to_device(packed.buffer, packed.on_device)
        return batch, packed

    def _pack(self, batch: InputBatch) -> PackedStep:
        """Plans the step, picks its size and fills that size's buffer."""
        plans = self.attention.plan(batch)
        return self._pack_at(self.graph_policy.choose(self.attention.needed_sizes(batch, plans)), batch, plans)

    def _pack_at(self, size: GraphSize, batch: InputBatch, plans: list[Any]) -> PackedStep:
        packed = self._inputs.at(size)
        self.batch_builder.pack(batch, packed.views)
        self.attention.pack(batch, plans, packed.size, packed.views)
        self._steady = None
        if batch.is_uniform_decode and batch.num_sampled == batch.num_reqs:
            steady_plans = self.attention.steady_plans(batch, plans, packed.size, packed.views)
            if steady_plans is not None:
                self._steady = SteadyDecode(batch, packed, steady_plans, self.requests)
        return packed

    def _sections(self, size: GraphSize) -> list[Section]:
        rooms = token_sections(size), self.attention.sections(size), self.prompt_embeds.sections(size)
        return in_order(chain.from_iterable(rooms))

    def _prepare_sampling(self, batch: InputBatch) -> SamplingPlan:
        """Which rules, sampler and log probabilities the batch's requests ask for."""
        return self.sampling.prepare(batch)

    def _run_model(
        self, size: GraphSize, packed: torch.Tensor, last_tokens: torch.Tensor, *embeds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The function that becomes a graph: packed inputs to logits, sample slots and hidden states."""
        arrays = unpack(packed, self._sections(size))
        sources = arrays["token_sources"]
        token_ids = torch.where(sources >= 0, last_tokens[sources.clamp(min=0)], arrays["token_ids"])
        context = get_forward_context()
        context.moe_layer_index = 0  # Counted up by vLLM's own expert layers, step by step.
        context.attn_metadata = self.attention.build(size, arrays)
        context.slot_mapping = self.attention.slot_mapping(size)
        inputs = self.prompt_embeds.model_inputs(self.model, token_ids, arrays, embeds)
        hidden_states = self.model(positions=arrays["positions"], intermediate_tensors=None, **inputs)
        context.attn_metadata = None  # type: ignore[assignment]
        logits = self._own_logits(hidden_states, arrays["logits_indices"])
        sample_slots = torch.stack((arrays["sample_rows"], arrays["sample_positions"]))
        return logits, sample_slots, hidden_states

    def _compute_logits(self, hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Logits [len(indices), V] float32 of some rows of the hidden states [T, hidden]."""
        return self.vocabulary.whole(self._own_logits(hidden_states, indices))

    def _own_logits(self, hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """This rank's part of them."""
        return self.vocabulary.own(self.model.compute_logits(hidden_states[indices]).float())

    # ---- Multimodal inputs: text-only so far, limits.py refuses the models ----

    def _calc_mrope_positions(self, scheduler_output: SchedulerOutput) -> np.ndarray | None:
        """Multimodal rotary positions [3, T], or None for a model whose positions are one-dimensional."""
        return None

    def _execute_encoder(self, scheduler_output: SchedulerOutput) -> list[torch.Tensor]:
        """Runs the scheduled encoder inputs; a text-only model has none."""
        if scheduler_output.scheduled_encoder_inputs:
            raise limits.UnsupportedConfigError("multimodal inputs are not supported yet: send text only")
        return []

    def _gather_encoder_outputs(self, scheduler_output: SchedulerOutput) -> list[torch.Tensor]:
        """Encoder outputs that fall into the scheduled tokens; a text-only model has none."""
        return []

    # ---- Runs without requests: profiling, capture, idle data-parallel ranks ----

    def _dummy_run(self, size: GraphSize) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs the model at a size on nothing but padding; returns logits, sample slots and hidden states."""
        self._bind_kv_caches()
        self._steady = None
        packed = self._inputs.at(size)
        packed.buffer[:] = 0
        self.batch_builder.pack_padding(packed.views)
        self.attention.pack_padding(packed.views)
        packed.on_device = self.device_ops.to_device(packed.buffer, packed.on_device)
        with override_forward_context(self._forward_context):
            self.attention.prepare(None, packed)
            padding = self.prompt_embeds.padding(size)
            return self._forward(size, packed.on_device, self.last_tokens[0], *padding)

    def _warm_up(self, sizes: Iterable[GraphSize]) -> None:
        """Runs every size, and all that sampling may need after it, once, largest first, under a progress bar."""
        warm_up(self, sizes)
