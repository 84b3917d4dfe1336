"""The platform plugin: how vLLM is configured for Neuron, or for the host where there is none."""

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from model_runner_base.platform import PagedPlatform
from neuron_runner import environment, ray_setup

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from neuron_runner.config import NeuronConfig


class NeuronPlatform(PagedPlatform):
    device_name = device_type = "xla" if environment.has_torch_xla() else environment.torch_device_type()
    dispatch_key = {"xla": "XLA", "cpu": "CPU"}.get(device_type, "PrivateUse1")
    ray_device_key = ray_setup.RESOURCE
    ray_noset_device_env_vars = ray_setup.SET_IN_WORKERS
    device_control_env_var = environment.VISIBLE_CORES
    worker_cls = "neuron_runner.worker.NeuronWorker"
    # PJRT CPU adds up large products of float16 in float16: twelve times the error, hundreds of times slower.
    dtypes = (torch.float32, torch.bfloat16)

    @property
    def additional_env_vars(self) -> list[str]:  # type: ignore[override]
        """Environment variables that Ray's workers take over, in addition to vLLM's own."""
        return ray_setup.copied_variables()

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Candidates of ``dtype="auto"``. PJRT CPU emulates bfloat16, 25 times slower than float32."""
        return [torch.bfloat16, torch.float32] if environment.neuron_device_visible() else [torch.float32]

    @classmethod
    def shares_host_memory(cls, vllm_config: "VllmConfig") -> bool:
        """Whether steps use the host's memory: on PJRT CPU and in eager mode they do, Neuron devices have their own."""
        return vllm_config.model_config.enforce_eager or not environment.neuron_device_visible()

    @classmethod
    def serves_connectors(cls, vllm_config: "VllmConfig") -> bool:
        """Whether steps run eagerly, or as openxla's graphs, whose caches have captured reads and writes of blocks."""
        from neuron_runner.config import read_neuron_config

        model = vllm_config.model_config
        if model is None or model.enforce_eager:
            return model is not None
        return read_neuron_config(vllm_config.additional_config).backend == "openxla"

    @classmethod
    def forbids_fork(cls) -> bool:
        return environment.xla_is_running()

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        if environment.neuron_device_visible():
            return "neuron"
        return "pjrt-cpu" if environment.has_torch_xla() else "cpu"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "neuron_runner.communicator.NeuronCommunicator"

    @classmethod
    def inference_mode(cls) -> AbstractContextManager:
        # Inference tensors have no version counter, which lazy tensors need.
        return torch.no_grad()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: "AttentionBackendEnum", attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        from neuron_runner.nki import use_nki

        plain = super().get_attn_backend_cls(selected_backend, attn_selector_config)
        if attn_selector_config.use_mla and use_nki():
            from model_runner_base.errors import UnsupportedConfigError
            from neuron_runner.nki.availability import NKI_VARIABLE

            raise UnsupportedConfigError(
                f"the NKI attention kernel does not support latent attention (MLA) yet: set {NKI_VARIABLE}=0 to run "
                "attention as plain torch"
            )
        return "neuron_runner.nki.attention.NkiAttentionBackend" if use_nki() else plain

    @classmethod
    def _check_cores(cls, parallel: "ParallelConfig") -> None:
        on_neuron = environment.neuron_device_visible()
        if parallel.use_ray:
            ray_setup.check_ray()
            if not on_neuron:
                ray_setup.give_cores(parallel.world_size)
        elif on_neuron:
            environment.check_cores(parallel.local_world_size)

    @classmethod
    def _check_dynamo(cls, config: "NeuronConfig") -> None:
        """Raises ValueError for what a backend of Dynamo cannot take, MissingRequirementError without its device."""
        from neuron_runner.nki.availability import NKI_VARIABLE

        backend = f"neuron_config.compile_backend={config.backend}"
        if os.environ.get(NKI_VARIABLE) == "1":
            raise ValueError(f"{NKI_VARIABLE}=1 asks for kernels that {backend} does not take: leave one of them out")
        if config.quant_dtype is not None:
            raise ValueError(f"neuron_config.quant_dtype is not supported with {backend}: leave one of them out")
        environment.torch_device()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        from neuron_runner.config import read_neuron_config

        config = read_neuron_config(vllm_config.additional_config)
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        is_compiled = model is None or not model.enforce_eager
        if is_compiled and config.runs_on_xla:
            environment.check_torch_xla()
        elif is_compiled:
            cls._check_dynamo(config)
        super().check_and_update_config(vllm_config)
        cls._check_cores(vllm_config.parallel_config)
        if model is not None:
            config.check_limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, model.max_model_len)
        if is_compiled:
            config.warms_up_in_background(vllm_config.parallel_config.world_size)
        if isinstance(vllm_config.additional_config, dict):
            # Hands the workers what the environment said; a host that is started separately reads its own environment.
            vllm_config.additional_config = config.written_into(vllm_config.additional_config)
