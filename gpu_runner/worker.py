"""The worker of GPUModelRunner, for vLLM's ``--worker-cls gpu_runner.GPUWorker``."""

import os

import torch
from vllm import envs
from vllm.config import ModelConfig
from vllm.distributed import set_custom_all_reduce
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm.platforms import current_platform
from vllm.profiler.wrapper import CudaProfilerWrapper, WorkerProfiler
from vllm.utils.deep_gemm import is_deep_gemm_supported
from vllm.utils.flashinfer import autotune, has_flashinfer
from vllm.v1.worker.workspace import init_workspace_manager, lock_workspace

from gpu_runner import vllm_compat
from gpu_runner.model_runner import GPUModelRunner
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.draft_loading import draft_of
from model_runner_base.worker import CompilationTimes, ModelRunnerWorker


def check_model(model: ModelConfig) -> None:
    """Raises UnsupportedConfigError for models that the base serves with its own layers only."""
    config = getattr(model, "hf_text_config", None)
    if getattr(config, "linear_num_value_heads", None) and model.dtype == torch.float32:
        raise UnsupportedConfigError("vLLM's kernels of gated delta nets take no float32: set dtype=bfloat16")
    if model.is_encoder_decoder or model.is_mm_prefix_lm:
        why = "layers of cross-attention" if model.is_encoder_decoder else "tokens of an image that see each other"
        raise UnsupportedConfigError(
            f"gpu_runner.GPUWorker does not serve models with {why} yet: leave out --worker-cls"
        )


class GPUWorker(ModelRunnerWorker):
    """vLLM's worker over GPUModelRunner: device, kernels and profiler; the rest is the base's."""

    model_runner_cls = GPUModelRunner
    profiler_activities = ("CPU", "CUDA")

    def make_device(self) -> torch.device:
        if not current_platform.is_cuda():
            raise UnsupportedConfigError(
                f"gpu_runner.GPUWorker serves CUDA GPUs, and vLLM runs on {current_platform.device_name!r} here: "
                "leave out --worker-cls"
            )
        check_model(self.model_config)
        os.environ.pop("NCCL_ASYNC_ERROR_HANDLING", None)  # Ray sets it; graphs that hold collectives fail with it.
        torch.set_float32_matmul_precision(envs.VLLM_FLOAT32_MATMUL_PRECISION)
        device = torch.device(f"cuda:{self.device_index}")
        current_platform.set_device(device)
        current_platform.check_if_supports_dtype(self.model_config.dtype)  # type: ignore[arg-type]
        vllm_compat.init_batch_invariance(self.vllm_config)
        set_custom_all_reduce(not self.parallel_config.disable_custom_all_reduce)
        init_workspace_manager(device)
        return device

    def compile_or_warm_up_model(self) -> CompilationTimes:  # type: ignore[override]
        self._tune_kernels()
        times = super().compile_or_warm_up_model()
        lock_workspace()  # Graphs hold its address.
        return times

    def _tune_kernels(self) -> None:
        """Compiles and tunes, as vLLM's own worker does, the kernels that would otherwise do so while serving."""
        runner = self.model_runner
        if envs.VLLM_USE_DEEP_GEMM and is_deep_gemm_supported() and envs.VLLM_DEEP_GEMM_WARMUP != "skip":
            deep_gemm_warmup(runner.get_model(), self.scheduler_config.max_num_batched_tokens)
        is_wanted = self.vllm_config.kernel_config.enable_flashinfer_autotune is not False
        if is_wanted and has_flashinfer() and current_platform.has_device_capability(90):
            with torch.inference_mode(), autotune():
                runner.profile_step()

    def make_profiler(self) -> WorkerProfiler | None:
        config = self.vllm_config.profiler_config
        return CudaProfilerWrapper(config) if config.profiler == "cuda" else super().make_profiler()

    def check_sleep(self, level: int = 1) -> None:
        """Raises ValueError for level 2 of a model whose weights, or whose draft's, were not shown to come back."""
        if level == 2 and self.model_config.is_multimodal_model:
            raise ValueError("weights of a multimodal model cannot be loaded again yet: sleep at level 1")
        if level == 2 and draft_of(self.get_model()) is not None:
            raise ValueError("level 2 is not supported with a draft yet: sleep at level 1")
        super().check_sleep(level)
