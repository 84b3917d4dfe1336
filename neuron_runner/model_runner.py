"""NeuronModelRunner: the four hooks of ModelRunnerBase on Neuron."""

from model_runner_base.heads.pooling.placement import pooler_left_out
from model_runner_base.model_runner import ModelRunnerBase
from model_runner_base.models.loader import load_checkpoint
from model_runner_base.models.tower_placement import towers_left_out
from model_runner_base.runner.memory import weights_memory
from model_runner_base.runner.step_memory import estimate_step_memory
from model_runner_base.step.graph_policy import GraphPolicy
from neuron_runner import environment
from neuron_runner.config import read_neuron_config
from neuron_runner.nki import use_nki
from neuron_runner.nki.tiling import KERNEL_KV_TILE, KERNEL_QUERY_TILE
from neuron_runner.sampling import sort_limits

LARGE_MODEL = 1 << 30
"""Bytes of weights from which on a host takes seconds for a step of the largest size."""


class NeuronModelRunner(ModelRunnerBase):
    """Runs the model as openxla graphs, one a bucket, on Neuron or PJRT CPU; eager on the host's CPU to debug."""

    _has_attention_kernel = False

    def _cache_device_properties(self) -> None:
        config = read_neuron_config(self.vllm_config.additional_config)
        if self.model_config.enforce_eager:
            # The device is torch's own CPU (see NeuronWorker.make_device): the base's defaults serve it.
            self.graph_policy.sort_limits = sort_limits(config)
            return
        from neuron_runner.policies import device_ops_for, policy_for

        self.device_ops = device_ops_for(config, self.device)
        self.graph_policy: GraphPolicy = policy_for(config, self.vllm_config.parallel_config.world_size)
        if not config.runs_on_xla:
            return
        self._has_attention_kernel = use_nki()
        if self._has_attention_kernel:
            self.CHUNK_QUERY_TILE = KERNEL_QUERY_TILE
            self.KV_TILE = self.CHUNK_KV_TILE = KERNEL_KV_TILE

    def load_model(self) -> None:
        """Loads on the host, lays the weights out for the device there, then moves them."""
        from neuron_runner import ops, quantization, weights
        from neuron_runner.ops.logits import cut_vocabulary

        ops.register()
        config = read_neuron_config(self.vllm_config.additional_config)
        is_quantized = config.quant_dtype is not None
        if is_quantized:
            quantization.check_quantizable(self.model_config)
        self.model = load_checkpoint(self.vllm_config)
        with towers_left_out(self.model), pooler_left_out(self.model):  # They run on the host.
            if self.vllm_config.lora_config is None:  # An adapter of the head adds to whole rows.
                self.vocabulary = cut_vocabulary(self.model)
            if is_quantized:
                quantization.quantize_weights(self.model)
            if not self.model_config.enforce_eager:
                if config.runs_on_xla:
                    weights.transpose_linear_weights(self.model)
                weights.move(self.model, self.device, self.device_ops.synchronize)
            weights.refuse_loading(self.model)
        is_on_host = not environment.neuron_device_visible()
        self.graph_policy.is_slow = is_on_host and weights_memory(self.model) >= LARGE_MODEL

    def profile_run(self) -> int:
        """Estimates a step's bytes by the largest graph's shapes.

        PJRT CPU reports no peak to measure, and nothing may be run before the caches exist.
        """
        limits = self.step_limits()
        self.graph_policy.configure(limits)
        sizes = self.graph_policy.sizes or limits.largest_sizes
        from neuron_runner.quantization import largest_float_bytes

        step_memory = estimate_step_memory(
            sizes,
            limits,
            self.get_kv_cache_spec(),
            self.model_config,
            gathers_cache=not self._has_attention_kernel,
            is_unrolled=True,
        )
        return step_memory + largest_float_bytes(self.model)

    def capture_model(self) -> None:
        self.warm_up(self.graph_policy.sizes or self.step_limits().largest_sizes)
