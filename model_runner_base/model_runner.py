"""ModelRunnerBase: one step of the engine, from the scheduler's output to sampled tokens.

This file must contain no device's name, no branch on a feature, and no formula of attention or sampling. These belong
in the files that it calls. A device plugs itself in through four hooks (``_cache_device_properties``, ``load_model``,
``profile_run``, ``capture_model``). The first of them may also install two objects, ``device_ops`` and
``graph_policy``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.tasks import SupportedTask

from model_runner_base.admission import limits
from model_runner_base.caches.allocation import allocate
from model_runner_base.caches.contiguous import useful_memory
from model_runner_base.caches.factory import collect_specs, make_caches
from model_runner_base.caches.group import AttentionGroup, CacheKind
from model_runner_base.caches.pair_shapes import AttentionMemory, attention_memory
from model_runner_base.caches.spans import BidirectionalSpans
from model_runner_base.caches.step_limits import in_pieces, step_limits
from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.factory import supported_tasks
from model_runner_base.heads.generate import SamplingPlan
from model_runner_base.heads.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    ModelRunnerOutput,
    make_output,
    with_fields,
)
from model_runner_base.heads.sampling.logprobs import reads_processed
from model_runner_base.heads.sampling.sampler import WHOLE, SamplingMode, Vocabulary, sample
from model_runner_base.inputs.adapters.adapters import NO_ADAPTERS, Adapters
from model_runner_base.inputs.adapters.lora import check_adapters, make_adapters
from model_runner_base.inputs.multimodal.encoder import NO_ENCODER, Encoder
from model_runner_base.inputs.multimodal.factory import choose_encoder
from model_runner_base.models.draft_loading import draft_of
from model_runner_base.models.loader import change_config
from model_runner_base.models.reloading import Load, reload_checkpoint, reloading
from model_runner_base.models.weight_stream import Weights
from model_runner_base.platform import shares_host_memory
from model_runner_base.runner.background import BackgroundCompiler
from model_runner_base.runner.kv_transfer import check_new_weights
from model_runner_base.runner.sleep import Sleep
from model_runner_base.runner.warm_up import profile_largest_step, warm_up_sizes
from model_runner_base.runner.wiring import StepParts, load_processors, wire
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import Forward, ModelResults, StepResults
from model_runner_base.step.graph_policy import GraphPolicy, StepFunction
from model_runner_base.step.guard import StepGuard, guarded, in_forward_context
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_failures import make_request_errors
from model_runner_base.step.schedule import GrammarOutput, Schedule, SchedulerOutput, read_grammar, read_schedule
from model_runner_base.step.sizes import StepLimits, StepSize
from model_runner_base.vllm_compat.types.kv_cache import CacheLayout, KVCacheConfig, KVCacheSpec, read_layout
from model_runner_base.vllm_compat.types.kv_connector import WorkerConnector

Output = ModelRunnerOutput | AsyncModelRunnerOutput


class ModelRunnerBase:
    """Base class of a device's model runner. A subclass adds the four hooks."""

    KV_TILE = 64
    """Number of cache positions in an attention KV tile of a decode row; ``kv_tile_for`` fits it to the block size.

    A request pays for whole tiles, so small ones suit short contexts. In plain torch long contexts cost the same with
    tiles of 64 and 256; a kernel may need larger ones. A device sets this and the next two in
    ``_cache_device_properties``.
    """
    CHUNK_QUERY_TILE = 64
    """Number of query tokens in a query tile of a chunk. The tokens of a tile share each key that is read."""
    CHUNK_KV_TILE = 128
    """Number of cache positions in a KV tile of a chunk. It is more than ``KV_TILE``, so a context has fewer tiles."""

    parts: StepParts
    """Parts of the step, which ``initialize_kv_cache`` makes."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        limits.check_config(vllm_config)
        check_adapters(vllm_config)
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.device = device
        parallel = vllm_config.parallel_config
        first_heard = parallel.tensor_parallel_size * (parallel.pipeline_parallel_size - 1)
        self.step_guard = StepGuard(parallel.rank - first_heard)
        self.background_compiler = BackgroundCompiler(self.step_guard)
        """Compiler of step sizes that are made while steps are served."""
        self.max_model_len = self.model_config.max_model_len
        self._wired_model_len: int | None = None
        """Model length that block tables and graphs were made for; None before ``initialize_kv_cache``."""
        self.errors = make_request_errors(vllm_config)
        self.sleep = Sleep(self)
        """Memory of weights and caches, which the worker frees and takes back between two steps."""
        self.pending: Callable[[GrammarOutput | None], Output] | None = None
        """Rest of a step, which ``execute_model`` leaves for ``sample_tokens``; None if there is none."""

        # _cache_device_properties may replace these two.
        self.device_ops = DeviceOps(device)
        self.graph_policy = GraphPolicy()
        # load_model replaces this if each rank has a part of the vocabulary.
        self.vocabulary: Vocabulary = WHOLE

        self.model: Any
        self.adapters: Adapters = NO_ADAPTERS
        """LoRA adapters of the model, which ``load_adapters`` makes."""
        self.encoder: Encoder = NO_ENCODER
        self.connector: WorkerConnector | None = None
        """KV connector, which the worker sets before ``initialize_kv_cache``."""
        self._cache_device_properties()
        self.logits_processors = load_processors(vllm_config, self.device_ops.eager_device)

    # ---- The four hooks of a device ----

    def _cache_device_properties(self) -> None:
        """Reads what the device can do, and installs ``device_ops`` and ``graph_policy``. The constructor calls it
        once."""
        raise NotImplementedError

    def load_model(self) -> None:
        """Sets ``self.model``, with its weights on the device."""
        raise NotImplementedError

    def profile_run(self) -> int:
        """Returns the device memory in bytes that the largest step needs in addition to weights and KV cache."""
        raise NotImplementedError

    def capture_model(self) -> None:
        """Makes every graph that a step may need. It is called once, after ``initialize_kv_cache``."""
        raise NotImplementedError

    # ---- Factories: a device overrides one to use a part of its own ----

    def make_kv_caches(self, layout: CacheLayout) -> tuple[list[torch.Tensor], dict[str, tuple[int, ...]]]:
        """Makes the cache tensors on the device; returns them, and by layer name the indices of a layer's caches."""
        with self.device_ops.memory_pool("kv_cache"):
            return allocate(layout, self.vllm_config, self.device_ops, self.KV_TILE)

    def make_caches(
        self, groups: list[AttentionGroup], limits: StepLimits, spans: BidirectionalSpans
    ) -> list[CacheKind]:
        """Makes the kinds of caches, each with some of the groups. The default is caches/factory.py's choice."""
        return make_caches(groups, limits, spans, self.vllm_config, self.device_ops)

    def make_sampler(self, mode: SamplingMode) -> StepFunction:
        """Returns the sampler of a mode; it takes the parameters of ``sample`` after the first three."""
        return partial(sample, mode, reads_processed(self.model_config.logprobs_mode), self.graph_policy.sort_limits)

    def make_output(self, batch: InputBatch, results: StepResults) -> AsyncModelRunnerOutput:
        """Makes the output of a step. The next step may change the arrays of ``batch``, so an output copies what it
        keeps.

        Its ``get_output`` returns ``with_fields(output, results.fields)``: what components report is there only after
        this method has returned.
        """
        return make_output(batch, results, self.device_ops)

    # ---- The engine's contract: before the first step ----

    def load_adapters(self) -> None:
        """Gives the loaded model slots for LoRA adapters, if LoRA is enabled."""
        self.adapters = make_adapters(self.vllm_config, self.model, self.graph_policy.wrap, self.device_ops)

    def load_encoder(self) -> None:
        """Makes the encoder of images and other items if the loaded model has one, and allocates memory for its
        outputs."""
        self.encoder = choose_encoder(self.vllm_config, self.model, self.graph_policy.wrap, self.device_ops)

    def get_model(self) -> nn.Module:
        return self.model

    def update_config(self, overrides: dict[str, dict[str, Any]]) -> None:
        """Changes fields of ``load_config``, which a later ``reload_weights`` uses; ``{"load_config": {field:
        value}}``."""
        change_config(self.vllm_config, overrides)

    def get_draft_model(self) -> nn.Module | None:
        """The draft model; None if there is none."""
        draft: nn.Module | None = draft_of(self.model)
        return draft

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Overwrites the model's weights in place; takes the arguments of ``reloading.reload_checkpoint``."""
        with self.step_guard.lock, self._new_weights():
            reload_checkpoint(self.model, self.vllm_config, *args, **kwargs)

    @contextmanager
    def reloading(self, is_draft: bool = False) -> Iterator[Load]:
        """Yields a function that loads a chunk of weights in place of the old ones, or of the draft model's.

        Inside of the block no step may run, and the caller holds ``step_guard.lock`` while it enters the block, loads
        and leaves. Once the function has returned, the sender may overwrite the chunk. Layers that a draft model shares
        with the model keep their weights. See ``models/reloading.py``.
        """
        speculation = self.vllm_config.speculative_config
        model, config, target = self.model, None, None
        if is_draft and speculation is not None:
            model, config, target = self.get_draft_model(), speculation.draft_model_config, self.model
        with self._new_weights(), reloading(model, self.vllm_config, config, target) as load_chunk:

            def load(weights: Weights) -> None:
                load_chunk(weights)
                self.device_ops.synchronize()

            yield load

    @contextmanager
    def _new_weights(self) -> Iterator[None]:
        """Context in which the model can get weights, after which encoder and device have followed."""
        self.sleep.check_weights()
        check_new_weights(self.connector)
        with self.adapters.set_aside():
            self.encoder.check_reload()
            try:
                yield
            finally:
                self.encoder.follow_reload()
            self.device_ops.synchronize()

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return supported_tasks(self.model, self.model_config)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return collect_specs(self.vllm_config)

    def useful_cache_memory(self) -> float:
        """Largest number of bytes of KV cache that requests can make use of."""
        return useful_memory(self.vllm_config, self.get_kv_cache_spec())

    def update_max_model_len(self, max_model_len: int) -> None:
        """Sets the model length that the engine has fitted to the free memory, before the KV cache exists.

        Later it can only be lowered, since block tables, plans and captured sizes are made for one length.
        """
        if self._wired_model_len is not None and max_model_len > self._wired_model_len:
            raise ValueError(
                f"max_model_len cannot grow to {max_model_len} once the KV cache is made for {self._wired_model_len}: "
                "start the engine with the larger one"
            )
        self.max_model_len = max_model_len

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates and binds the KV caches, and wires the step, whose parts depend on them."""
        self._wired_model_len = self.max_model_len
        self.parts = wire(self, read_layout(kv_cache_config))

    @property
    def use_piecewise_graph(self) -> bool:
        """Whether steps are padded to sizes of graphs, which is the case if the graph policy has sizes."""
        return bool(self.tokenwise_graph_batch_sizes)

    @property
    def tokenwise_graph_batch_sizes(self) -> list[int]:
        """Numbers of tokens that steps are padded to. Empty for an eager policy; grows while sizes are compiled."""
        return sorted({size.num_tokens for size in self.graph_policy.offered})

    def step_limits(self, num_lines: int = 0) -> StepLimits:
        """Limits of a step; ``num_lines`` are the lines of a contiguous cache, if decode may read all of them."""
        tiles = self.KV_TILE, self.CHUNK_QUERY_TILE, self.CHUNK_KV_TILE
        limits = step_limits(self.vllm_config, self.max_model_len, *tiles, num_lines)
        return in_pieces(limits, self._attention_memory, self.get_kv_cache_spec().values(), self.vllm_config)

    @cached_property
    def _attention_memory(self) -> AttentionMemory:
        """Memory that attention in plain torch may take at a time."""
        total = self.device_ops.memory_info().total
        return attention_memory(self.vllm_config, total, shares_host_memory(self.vllm_config))

    @contextmanager
    def changing_adapters(self) -> Iterator[Adapters]:
        """Yields the adapters between two steps. An adapter may take another's slot, so the next step is packed
        from scratch."""
        with self.step_guard.lock, current_platform.inference_mode():
            self.parts.repeat.stop()
            yield self.adapters

    # ---- The engine's contract: one step ----

    @guarded
    @in_forward_context
    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None) -> Output | None:
        """Launches the model on the scheduled tokens; ``sample_tokens`` follows unless this returns an output.

        ``intermediate_tensors`` are None: stages of a pipeline send them themselves (``heads/pipeline_stages.py``).
        """
        parts, schedule = self.parts, self._update_states(read_schedule(scheduler_output))
        self._execute_encoder(schedule)
        if not schedule.total_num_tokens:
            return self._end_without_tokens(scheduler_output)
        batch, step = self._prepare_inputs(schedule)
        forward = Forward(schedule, batch, step, *parts.graph.run(batch, step))
        answer = parts.head.answer(forward)
        if answer is not None:
            return self._end_step(forward, answer)
        self.pending = partial(self._sample, forward)
        return None

    @guarded
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Output | None:
        """Ends the step that ``execute_model`` has begun; None if that has failed, and the engine raises its error."""
        pending, self.pending = self.pending, None
        return None if pending is None else pending(grammar_output)

    def _sample(self, forward: Forward, grammar_output: GrammarOutput | None) -> Output:
        """Launches the sampler on a forward pass; the device records the tokens by row."""
        plan = self._prepare_sampling(forward.batch)
        return self._end_step(forward, self.parts.head.sample(plan, forward, read_grammar(grammar_output)))

    def _end_step(self, forward: Forward, results: StepResults) -> Output:
        """Begins the copy of a step's results, and lets the components end the step; returns the step's output."""
        parts, forward.results = self.parts, results
        launched = self.make_output(forward.batch, results)
        results.fields = parts.components.end_step(forward)
        if self.scheduler_config.async_scheduling:
            return launched
        output = launched.get_output()
        parts.components.read_output(forward.batch, output)
        return output

    def _end_without_tokens(self, scheduler_output: SchedulerOutput) -> Output | None:
        """Ends a step that has no tokens, or none that are left since all of its requests have failed."""
        components, num_scheduled = self.parts.components, scheduler_output.total_num_scheduled_tokens
        if num_scheduled:
            components.run_idle()
        output = with_fields(EMPTY_MODEL_RUNNER_OUTPUT, components.end_step(None))
        if not num_scheduled or self.parts.head.answers_at_once:
            return output
        self.pending = lambda grammar_output: output
        return None

    @guarded
    def execute_dummy_batch(self) -> None:
        """Runs what this replica adds to a step of other replicas, while it has no tokens itself."""
        self.parts.components.run_idle()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns the last drafts; None if there is no drafter."""
        return self.parts.drafter.take(self.parts.requests.rows)

    def _update_states(self, schedule: Schedule) -> Schedule:
        """Updates rows and block tables as the scheduler says; returns the schedule without requests that failed."""
        return self.parts.updates.apply(schedule)

    def _execute_encoder(self, schedule: Schedule) -> None:
        """Begins the step in all components, of which one may be the encoder of the items that the scheduler names."""
        self.parts.components.begin_step(schedule)

    def _prepare_inputs(self, schedule: Schedule) -> tuple[InputBatch, PackedStep]:
        """Returns the batch, and its packed buffer on the device: a repeat of the last step, or packed from scratch."""
        return self.parts.repeat.advance(schedule) or self._pack(self.parts.batches.build(schedule))

    def _pack(self, batch: InputBatch) -> tuple[InputBatch, PackedStep]:
        """Packs the batch at the cheapest size that holds it; the next step may repeat this one."""
        parts, size = self.parts, self.graph_policy.choose(self.parts.layout.needs(batch))
        step = parts.graph.pack(size, batch, parts.repeat.place_for(batch))
        parts.repeat.watch(batch, step, parts.components)
        return batch, step

    def _prepare_sampling(self, batch: InputBatch) -> SamplingPlan:
        """Plans the rules, sampler and log probabilities that the batch's requests ask for."""
        return self.parts.head.plan(batch)

    def reset_encoder_cache(self) -> None:
        """Forgets all encoder outputs, for instance because the weights have changed."""
        self.encoder.reset()

    # ---- Runs without requests: profiling and warm-up ----

    def _dummy_run(self, size: StepSize) -> ModelResults:
        """Runs the model at a size with padding only; returns what ``ModelGraph.run`` returns."""
        return self.parts.graph.dummy_run(size)

    def profile_step(self) -> None:
        """Runs the largest step without KV caches, for a device that measures its memory in ``profile_run``."""
        profile_largest_step(self)

    def warm_up(self, sizes: Iterable[StepSize]) -> None:
        """Makes the graphs of the sizes, and all that sampling may need for them (``runner/warm_up.py``)."""
        warm_up_sizes(self, sizes)
