"""Platform base class of every out-of-tree device: configures vLLM for paged attention in plain torch.

A device subclasses ``PagedPlatform``, sets its name and its worker, and overrides what differs. vLLM's config package
imports the platform, so this file may not import that package, or a folder that does, at its top.
"""

import math
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from model_runner_base.admission.front_end import quiet_scheduler_warning, stand_before
from model_runner_base.admission.our_engines import SCHEDULER, check_arriving
from model_runner_base.vllm_compat.probes.config import (
    calculates_kv_scales,
    forgo_kv_scales,
    note_local_replicas,
    offloads_weights,
    set_default_block_size,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

GIB = 1 << 30


class PagedPlatform(Platform):
    """Platform of a ModelRunnerWorker. A subclass sets ``device_name``, ``device_type`` and ``worker_cls``."""

    _enum = PlatformEnum.OOT
    dist_backend = "gloo"
    # vLLM compiles a few helpers at import. With "eager" they run as they are, or become part of a device's own graphs.
    simple_compile_backend = "eager"

    worker_cls: str
    """Qualified name of the worker, which vLLM imports in the worker's process."""
    scheduler_cls: str = SCHEDULER
    """Qualified name of the scheduler's class, or of a function that makes it, if the user names none."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    """Dtypes that a model may run in. ``dtype="auto"`` takes the checkpoint's; of a checkpoint in float32, or in a
    dtype that is not listed, the first. A device that emulates a dtype leaves it out of ``supported_dtypes``, so that a
    user has to ask for it."""
    default_block_size = 32
    has_cache_lines = False
    """Whether a request's keys and values are one block (docs/kv_cache.md#contiguous). ``block_size`` is then
    ``max_model_len``, rounded up to a multiple of 64 in place of ``default_block_size``, and a smaller one is
    refused."""
    default_max_num_batched_tokens = 512
    default_max_num_seqs = 64
    default_memory_share = 0.5
    """Share of the host's free memory for the KV cache, if the user sets no size and no share."""

    serves_stages = False
    """Whether workers can be stages of a pipeline (``heads/pipeline_stages.py``). A device says so whose graphs take
    and return further tensors, and whose ranks choose equal sizes: not one that compiles sizes while it serves."""

    serves_replicas = False
    """Whether engines can be replicated (``data_parallel_size``). A device says so whose workers take the device at
    ``ModelRunnerWorker.device_index``."""

    serves_expert_replicas = False
    """Whether replicas can share experts (``models/layers/expert_exchange.py``). A device says so whose steps run
    eagerly, with collectives among its operations, and whose estimate of a step's memory takes ``num_replicas``."""

    serves_decode_context = False
    """Whether ranks can keep a part of each request's keys (``decode_context_parallel_size``). A device says so whose
    layers run the base's own attention, with collectives among its operations."""

    num_local_workers = 1
    """Number of workers on this host, which a worker sets when it starts."""

    stands_before_requests = True
    """Whether this class prepares front ends and checks requests; if not, ``front_end.register`` makes a platform do
    so."""

    def __init__(self) -> None:
        """Suppresses vLLM's scheduler warning. vLLM makes a platform in each process, engine processes included."""
        quiet_scheduler_warning()

    def is_sleep_mode_available(self) -> bool:
        """Whether ``enable_sleep_mode`` is allowed; ``DeviceOps.sleep`` then frees memory, and ``wake`` takes it
        back."""
        return True

    @classmethod
    def shares_host_memory(cls, vllm_config: "VllmConfig") -> bool:
        """Whether the device's memory is the host's, which other processes use too, and other workers of
        the engine."""
        return True

    @classmethod
    def serves_connectors(cls, vllm_config: "VllmConfig") -> bool:
        """Whether a KV connector may read and write the caches between two steps. Set it once that was tried.

        Either ``GraphPolicy.replaces_state`` is set, or the caches are the same tensors in every step, and torch's own
        indexing of them compiles nothing.
        """
        return False

    @classmethod
    def forbids_fork(cls) -> bool:
        """Whether a process that is forked from this one cannot use the device."""
        return False

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return list(self.dtypes)

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Returns True: each KV-cache group has its own block table, so layers with a window free blocks that left
        it."""
        return True

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        if dtype not in cls.dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in cls.dtypes)
            raise ValueError(f"{dtype} is not supported on this platform: use {names}")

    @classmethod
    def import_kernels(cls) -> None:
        """Does nothing: vLLM is built without kernels."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def current_device(cls) -> str:
        """The device of layers that ask for it as they are made: models are loaded on the host."""
        return "cpu"

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Does nothing: a process has one device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Does nothing: tokens are drawn with the base's own seeds, and ``set_random_seed`` seeds torch itself."""

    @classmethod
    def device_count(cls) -> int:
        """Number of devices on this host, one for each worker. vLLM divides ranks by it to tell which of them share a
        host."""
        return cls.num_local_workers

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """Qualified name of the class that runs the matrix products of LoRA layers."""
        return "model_runner_base.inputs.adapters.punica.MaskedPunicaWrapper"

    @classmethod
    def can_update_inplace(cls) -> bool:
        """Returns False, so LoRA layers read the returned products: tensors of a graph are not changed in place."""
        return False

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: "AttentionBackendEnum", attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        cls._check_backend(selected_backend)
        if attn_selector_config.use_mla and attn_selector_config.use_sparse:
            return "model_runner_base.attention.sparse.SparseLatentBackend"
        if attn_selector_config.use_mla:
            return "model_runner_base.attention.latent.LatentAttentionBackend"
        from vllm.config import get_current_vllm_config

        if get_current_vllm_config().parallel_config.decode_context_parallel_size > 1:
            return "model_runner_base.attention.decode_context.ContextBackend"
        return "model_runner_base.attention.paged.PagedAttentionBackend"

    @staticmethod
    def _check_backend(selected: "AttentionBackendEnum | None") -> None:
        """Raises UnsupportedConfigError for an attention backend of vLLM's that the user chose."""
        from model_runner_base.errors import UnsupportedConfigError

        if selected is not None and selected.name != "CUSTOM":
            raise UnsupportedConfigError(f"attention backend {selected.name} does not run here: leave the choice out")

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> type[Any]:
        """Class that newer releases of vLLM make for each layer of latent attention, and that computes nothing here."""
        from model_runner_base.attention.latent import NoPrefill

        return NoPrefill

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Lowers vLLM's default limits, allows any ``--block-size``, makes vLLM recognise marked EAGLE heads, and has
        quantised checkpoints dequantised, or refused by name.

        A step needs memory for the largest size within the limits, and a device with graphs captures every size at
        start-up. With vLLM's own defaults (256 requests, 8,192 tokens) that would cost minutes and gigabytes.
        """
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext

        from model_runner_base.admission.hybrid_config import (
            keep_block_size,
            know_mamba2,
            leave_prefix_caching_off,
        )
        from model_runner_base.models.quantized.configuration import set_aside
        from model_runner_base.models.quantized.gguf.engine_args import serve_gguf_files
        from model_runner_base.vllm_compat.patches.configs import (
            before_a_method_is_chosen,
            leave_backend_open,
            recognise_marked_heads,
            take_dtypes_in_order,
        )

        def batch_defaults(world_size: int) -> tuple[dict[UsageContext | None, int], dict[UsageContext | None, int]]:
            contexts = (None, *UsageContext)
            return dict.fromkeys(contexts, cls.default_max_num_batched_tokens), dict.fromkeys(
                contexts, cls.default_max_num_seqs
            )

        if parser is not None:
            # vLLM's command line allows the block sizes of its kernels only; here others work too, such as
            # max_model_len.
            option = parser._option_string_actions.get("--block-size")
            if option is not None:
                option.choices = None
        EngineArgs.get_batch_defaults = staticmethod(batch_defaults)  # type: ignore[assignment, method-assign]
        take_dtypes_in_order()
        recognise_marked_heads(EngineArgs)
        before_a_method_is_chosen(set_aside)
        keep_block_size()
        know_mamba2()
        leave_prefix_caching_off()
        leave_backend_open()
        serve_gguf_files()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Raises an error for settings that are not supported, then sets those that the base needs and the user left
        open."""
        from vllm import envs
        from vllm.config import CompilationMode

        from model_runner_base.admission.kv_connectors import offload_by_the_base
        from model_runner_base.attention.plan import kv_tile_for
        from model_runner_base.caches.pair_shapes import asked_memory
        from model_runner_base.errors import UnsupportedConfigError
        from model_runner_base.models.quantized.configuration import check_checkpoint, set_aside
        from model_runner_base.scheduling.releases import has_known_steps
        from model_runner_base.vllm_compat.probes.models import has_own_kernels, has_unequal_heads, tokens_per_entry
        from model_runner_base.vllm_compat.probes.multimodal import takes_items
        from model_runner_base.vllm_compat.types.kv_cache import raise_limit_for_encoder

        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = cls.worker_cls
        note_local_replicas(vllm_config.parallel_config)
        if cls.has_cache_lines and vllm_config.model_config:
            from model_runner_base.caches.contiguous import set_line_size

            set_line_size(vllm_config)
        else:
            entry = tokens_per_entry(vllm_config.model_config) if vllm_config.model_config else 1
            set_default_block_size(vllm_config.cache_config, math.lcm(cls.default_block_size, entry))
        offload_by_the_base(vllm_config)
        check_serves_connectors(cls, vllm_config)
        if cls.stands_before_requests:
            stand_before(vllm_config, cls.scheduler_cls)
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        if model and model.is_mm_prefix_lm and takes_items(model):
            # Tokens of an image see each other, so they must be in one step. vLLM's own schedulers may split an image.
            if scheduler.scheduler_cls != cls.scheduler_cls or not has_known_steps():
                raise UnsupportedConfigError(
                    "tokens of an image see each other in this model, and another scheduler may split an image: leave "
                    "out scheduler_cls"
                )
            scheduler.disable_chunked_mm_input = True
            # Two consecutive items may share a token of text, so the outputs of both are held at once.
            scheduler.encoder_cache_size = 2 * scheduler.max_num_batched_tokens
        if model and model.is_encoder_decoder:
            raise_limit_for_encoder(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.world_size > 1 or parallel.data_parallel_size > 1 or cls.forbids_fork():
            # A forked process has the locks of its parent's threads, and none of the threads. A server has a forked
            # replica's signals: one replica that is told to end would end the server before its clients have answers.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
            if envs.VLLM_WORKER_MULTIPROC_METHOD != "spawn":
                # An engine in this process has made vLLM cache its environment variables, so they are read again.
                envs.disable_envs_cache()
                envs.enable_envs_cache()
        # Checkpoints are loaded on the host; load_model moves them.
        vllm_config.load_config.device = "cpu"
        # Graphs are the graph policy's: vLLM's own compilation stays off, and layers run their out-of-tree forward.
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.custom_ops = ["all"]

        cache = vllm_config.cache_config
        if offloads_weights(vllm_config):
            raise UnsupportedConfigError(
                "weights are not offloaded here: leave out cpu_offload_gb and offload_group_size"
            )
        if calculates_kv_scales(cache) and cache.cache_dtype.startswith("fp8"):
            raise UnsupportedConfigError(
                "scales of an 8-bit KV cache are not calculated here: leave out calculate_kv_scales, and those of the "
                "checkpoint are taken, or 1 where it has none"
            )
        forgo_kv_scales(cache)
        kv_tile_for(cache.block_size)  # Raises for a size that attention cannot read in parts.
        asked_memory(vllm_config)  # Raises for a setting that is no size.
        model = vllm_config.model_config
        if model is None:
            return
        speculation = vllm_config.speculative_config
        draft = None if speculation is None else speculation.draft_model_config
        for each in filter(None, (model, draft)):
            set_aside(each, cls.supported_quantization)  # A config that the engine's arguments did not make.
            check_checkpoint(each, vllm_config.load_config)
            if has_own_kernels(each.architecture, each.hf_text_config):
                raise UnsupportedConfigError(
                    f"{each.architecture} is not supported here yet: vLLM runs its keys and values of unequal head "
                    "sizes with kernels of its own; use another model"
                )
            if has_unequal_heads(each.architecture, each.hf_text_config):
                # Its class takes a backend that was chosen without a question to the platform.
                cls._check_backend(vllm_config.attention_config.backend)
        if model.quantization is None:
            vllm_config.quant_config = None
        if not cache.kv_cache_memory_bytes and cls.shares_host_memory(vllm_config):
            cache.kv_cache_memory_bytes = cls._kv_cache_bytes()
        assert isinstance(model.dtype, torch.dtype)
        cls.check_if_supports_dtype(model.dtype)

    @classmethod
    def _kv_cache_bytes(cls) -> int | None:
        """Bytes of a KV cache in the host's memory, as the environment says; raises ValueError if that is no size."""
        asked = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        if not asked:
            return None
        try:
            gib = float(asked)
        except ValueError:
            gib = math.nan
        if not 0 < gib < math.inf:
            raise ValueError(f"VLLM_CPU_KVCACHE_SPACE={asked} is not a size in GiB: give a number above 0")
        return int(gib * GIB)

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: "VllmConfig") -> None:
        """Does nothing: ``check_and_update_config`` has set the block size."""

    @classmethod
    def validate_request(  # type: ignore[override]
        cls, processed_inputs: Any, params: "SamplingParams | PoolingParams", prompt: Any = None
    ) -> None:
        """Raises ValueError for a request whose output would be wrong. vLLM passes two arguments by position, or three
        by name."""
        check_arriving(processed_inputs, params)


def shares_host_memory(vllm_config: "VllmConfig") -> bool:
    """Whether the memory of the process's device is the host's; not so on a platform that is no ``PagedPlatform``."""
    from vllm.platforms import current_platform

    # No getattr: vLLM's platforms return None for attributes that they do not have.
    return isinstance(current_platform, PagedPlatform) and current_platform.shares_host_memory(vllm_config)


def check_serves_connectors(platform: Any, vllm_config: "VllmConfig") -> None:
    """Raises UnsupportedConfigError for a KV connector on a platform that serves none."""
    from model_runner_base.errors import UnsupportedConfigError

    serves = getattr(platform, "serves_connectors", None)
    if vllm_config.kv_transfer_config is not None and not (serves and serves(vllm_config)):
        raise UnsupportedConfigError(
            "KV connectors are not supported on this device yet, or not with these settings: leave out "
            "kv_transfer_config and kv_offloading_size"
        )
