"""The platform plugin: how vLLM is configured for openxla on Neuron or PJRT CPU."""

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from neuron_runner import environment

if TYPE_CHECKING:
    from vllm.attention.backends.registry import AttentionBackendEnum
    from vllm.config import VllmConfig
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

DEFAULT_BLOCK_SIZE = 32
DEFAULT_KV_CACHE_GIB = 1
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
DEFAULT_MAX_NUM_SEQS = 64


class NeuronPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "xla"
    device_type = "xla"
    dispatch_key = "XLA"
    ray_device_key = "neuron_cores"
    device_control_env_var = "NEURON_RT_VISIBLE_CORES"
    dist_backend = "gloo"
    # vLLM compiles a few helpers at import; they become part of the model's graph instead.
    simple_compile_backend = "eager"
    # Requests are checked here, where no model config is at hand: the newest engine's vocabulary stands for all.
    _vocab_size: int

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """What ``dtype="auto"`` chooses from. PJRT CPU emulates bfloat16, 25 times slower than float32."""
        return [torch.bfloat16, torch.float32] if environment.neuron_device_visible() else [torch.float32]

    @classmethod
    def import_kernels(cls) -> None:
        """There are none: vLLM is built without kernels."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "neuron" if environment.neuron_device_visible() else "pjrt-cpu"

    @classmethod
    def inference_mode(cls) -> AbstractContextManager:
        # Inference tensors have no version counter, which lazy tensors need.
        return torch.no_grad()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """A process has one device."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{dtype} is not supported on this platform: use float32 or bfloat16")

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: "AttentionBackendEnum", attn_selector_config: Any) -> str:
        if selected_backend is not None and selected_backend.name != "CUSTOM":
            raise ValueError(f"attention backend {selected_backend.name} does not run here: leave the choice out")
        if attn_selector_config.use_mla:
            raise ValueError("models with multi-head latent attention (MLA) are not supported yet")
        return "model_runner_base.attention.paged.PagedAttentionBackend"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Lowers the limits that hold where the user gives none.

        Every size within them is compiled at start-up, and a step needs memory for the largest: vLLM's own defaults
        (256 requests, 8,192 tokens), made for GPUs, cost minutes and gigabytes here.
        """
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext

        def batch_defaults(world_size: int) -> tuple[dict[UsageContext | None, int], dict[UsageContext | None, int]]:
            contexts = (None, *UsageContext)
            return dict.fromkeys(contexts, DEFAULT_MAX_NUM_BATCHED_TOKENS), dict.fromkeys(
                contexts, DEFAULT_MAX_NUM_SEQS
            )

        EngineArgs.get_batch_defaults = staticmethod(batch_defaults)  # type: ignore[assignment, method-assign]

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        environment.check_torch_xla()
        # vLLM's config package imports the platform, so this module cannot import it at its top.
        from vllm.config import CompilationMode, CUDAGraphMode

        from model_runner_base.limits import check_config
        from neuron_runner.config import read_neuron_config

        check_config(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "neuron_runner.worker.NeuronWorker"
        vllm_config.load_config.device = "cpu"
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.custom_ops = ["all"]

        cache = vllm_config.cache_config
        if cache.block_size is None:
            cache.block_size = DEFAULT_BLOCK_SIZE
        model = vllm_config.model_config
        if model is None:
            return
        if not environment.neuron_device_visible():
            cls._configure_for_host(vllm_config)
        cls._vocab_size = model.get_vocab_size()
        assert isinstance(model.dtype, torch.dtype)
        cls.check_if_supports_dtype(model.dtype)
        scheduler = vllm_config.scheduler_config
        read_neuron_config(vllm_config.additional_config).check_limits(
            scheduler.max_num_batched_tokens, scheduler.max_num_seqs, model.max_model_len
        )

    @classmethod
    def _configure_for_host(cls, vllm_config: "VllmConfig") -> None:
        """PJRT CPU shares its memory with everything else on the host: take a fixed amount, not a share."""
        cache = vllm_config.cache_config
        if cache.kv_cache_memory_bytes is None:
            gib = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or DEFAULT_KV_CACHE_GIB)
            cache.kv_cache_memory_bytes = int(gib * (1 << 30))

    @classmethod
    def validate_request(cls, prompt: Any, params: "SamplingParams | PoolingParams", processed_inputs: Any) -> None:
        from model_runner_base.limits import check_request

        check_request(params, processed_inputs.get("prompt_token_ids") or [], cls._vocab_size)
