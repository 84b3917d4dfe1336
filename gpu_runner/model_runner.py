"""GPUModelRunner: the four hooks of ModelRunnerBase on CUDA."""

from vllm.config import CompilationMode
from vllm.distributed.parallel_state import graph_capture
from vllm.logger import init_logger
from vllm.utils.mem_constants import GiB_bytes

from gpu_runner.cuda_graphs import frozen_garbage
from gpu_runner.device_ops import CudaDeviceOps
from gpu_runner.graph_policy import CudaGraphPolicy, mark_views
from gpu_runner.static_inputs import StaticInputs
from gpu_runner.vllm_compat import prepare_offloading
from model_runner_base.inputs.embeddings import embeddings_memory
from model_runner_base.model_runner import ModelRunnerBase
from model_runner_base.models.draft_loading import ATTRIBUTE as DRAFT
from model_runner_base.models.loader import load_checkpoint
from model_runner_base.runner.memory import DeviceMemoryProfiler
from model_runner_base.vllm_compat.types.speculation import max_step_tokens

logger = init_logger(f"vllm.{__name__}")


class GPUModelRunner(ModelRunnerBase):
    """Runs vLLM's models with vLLM's kernels on a CUDA GPU, as CUDA graphs where the config asks for them."""

    def _cache_device_properties(self) -> None:
        mark_views()
        self.device_ops: CudaDeviceOps = CudaDeviceOps(self.device, self.model_config.enable_sleep_mode)
        self.graph_policy: CudaGraphPolicy = CudaGraphPolicy(self.vllm_config)

    def load_model(self) -> None:
        """Loads with vLLM's loaders, straight to the device. All layers keep vLLM's kernels, quantised ones too."""
        prepare_offloading(self.vllm_config)
        self.model = load_checkpoint(self.vllm_config, use_plain_layers=False)
        compilation = self.vllm_config.compilation_config
        if compilation.mode == CompilationMode.STOCK_TORCH_COMPILE:
            self.model.compile(fullgraph=True, backend=compilation.init_backend(self.vllm_config))
        for model in (self.model, getattr(self.model, DRAFT, None)):
            if model is not None:
                inputs = StaticInputs(max_step_tokens(self.vllm_config), self.device)
                model.register_forward_pre_hook(inputs, with_kwargs=True)

    def profile_run(self) -> int:
        """Bytes that a step takes: the larger of two measured peaks, the encoders' and the largest step's, and the pool
        of prompt embeddings, which is allocated later."""
        max_num_tokens = self.scheduler_config.max_num_batched_tokens
        held = embeddings_memory(self.model_config, max_num_tokens)
        peak_memory = self.device_ops.peak_memory
        return max(peak_memory(self.encoder.profile), peak_memory(self.profile_step)) + held

    def capture_model(self) -> None:
        with DeviceMemoryProfiler(self.device_ops) as profiler, frozen_garbage(), graph_capture(self.device):
            self.warm_up(self.graph_policy.warm_up_sizes())
        logger.info("Capturing graphs took %.2f GiB of device memory.", profiler.consumed_memory / GiB_bytes)
