"""LoRA adapters of a model whose layers are vLLM's."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import supports_lora
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.heads.pipeline_stages import gather_stages
from model_runner_base.inputs.adapters.adapters import NO_ADAPTERS, Adapters
from model_runner_base.inputs.adapters.inputs import AdapterInputs
from model_runner_base.inputs.adapters.kernels import KernelProducts
from model_runner_base.inputs.adapters.manager import AdapterManager
from model_runner_base.inputs.adapters.punica import MaskedPunicaWrapper
from model_runner_base.inputs.adapters.slots import NO_SLOT, Products
from model_runner_base.step.components import StepComponent
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.request_states import RequestStates
from model_runner_base.vllm_compat.types.speculation import read_speculation


class LoRAAdapters(Adapters):
    """Replaces a loaded model's layers by LoRA layers with slots for ``max_loras`` adapters on the device.

    Raises UnsupportedConfigError for a model that takes no adapters.
    """

    def __init__(self, vllm_config: VllmConfig, model: Any, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        if not supports_lora(model):
            raise UnsupportedConfigError(f"{type(model).__name__} takes no LoRA adapters: leave out enable_lora")
        self._manager = AdapterManager(vllm_config, device_ops.device, model)
        self._slots = self._manager.slots
        (wrapper,) = self._slots.punica_wrapper_mapping.values()
        self.products = _products_of(wrapper)
        """LoRA products of the layers; a step's graph binds the slots of its tokens to them."""
        self.products.vocab_size = self._slots.vocab_size
        self._slots.use_slots(self.products.make_layers(wrap, device_ops))
        # Every stage checks whole adapters, so that none has loaded one that another stage refuses.
        slots = self._slots
        for widths, without, takes in gather_stages(vllm_config, (slots.widths, slots.without, slots.takes_parameters)):
            slots.widths |= widths
            slots.without |= without
            slots.takes_parameters |= takes
        self.batches_take_turns = vllm_config.parallel_config.pipeline_parallel_size > 1
        """Whether a batch repeats while another one's steps run in between."""
        self._device_ops = device_ops
        scheduler = vllm_config.scheduler_config
        num_sampled = 1 + read_speculation(vllm_config).num_drafts
        self._most_inputs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs * num_sampled
        """Largest numbers of tokens and of logits rows in a step."""

    def add(self, request: LoRARequest) -> bool:
        return self._manager.add_adapter(request)

    def remove(self, lora_id: int) -> bool:
        return self._manager.remove_adapter(lora_id)

    def pin(self, lora_id: int) -> bool:
        return self._manager.pin_adapter(lora_id)

    def list(self) -> set[int]:
        return self._manager.list_adapters()

    def expect(self, request: LoRARequest) -> None:
        if request.lora_int_id not in self.list():
            self._manager.ready([request])

    def components(self, requests: RequestStates) -> Sequence[StepComponent]:
        self._inputs = AdapterInputs(requests, self)
        return (self._inputs,)

    def logits_inputs(self, row: int | None, count: int) -> tuple[np.ndarray, ...]:
        return self._inputs.logits_inputs(row, count)

    def bind_logits(self, slots: torch.Tensor) -> None:  # type: ignore[override]
        self.products.bind(slots, slots)

    def unbind_logits(self) -> None:
        self.products.unbind()

    def ready(self, requests: Iterable[LoRARequest]) -> dict[int, int]:
        """Puts these adapters into slots, unless they are in some; returns a dict from adapter id to slot."""
        self._manager.ready(requests)
        return {number: slot for slot, number in enumerate(self.ids) if number is not None}

    @property
    def ids(self) -> Sequence[int | None]:
        """Id of the adapter in each slot; None for a free one."""
        return self._slots.lora_index_to_id

    def warm_up(self) -> None:
        """Runs once the functions that write a slot, for each layer."""
        for layer in self._slots.slotted.values():
            layer.warm_up()

    def slots_memory(self) -> int:
        return sum(layer.slots_memory() for layer in self._slots.slotted.values())

    def step_memory(self) -> int:
        """Upper estimate, in bytes: the products of one layer, and one layer's matrices while a slot is written."""
        layers = self._slots.slotted.values()
        products = max((layer.products_memory(*self._most_inputs) for layer in layers), default=0)
        return products + max((layer.write_memory() for layer in layers), default=0)

    @contextmanager
    def unused(self, num_tokens: int, num_logits: int) -> Iterator[None]:
        tokens, logits = (self._device_ops.zeros((num,), torch.int32) + NO_SLOT for num in (num_tokens, num_logits))
        self.products.bind(tokens, logits)
        yield
        self.products.unbind()

    def set_aside(self) -> AbstractContextManager[None]:
        return self._slots.set_aside()


def check_adapters(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError if the platform's LoRA products cannot serve; called before anything is loaded."""
    lora = vllm_config.lora_config
    if lora is None:
        return
    for setting in ("enable_mixed_moe_lora_format", "enable_moe_shared_loras"):
        if getattr(lora, setting, False) and vllm_config.model_config.is_moe:
            raise UnsupportedConfigError(
                f"adapters of experts in another format than the model's are not supported yet: leave out {setting}"
            )
    wrapper = resolve_obj_by_qualname(current_platform.get_punica_wrapper())
    if issubclass(wrapper, PunicaWrapperGPU):
        KernelProducts.check(vllm_config)
    elif not issubclass(wrapper, MaskedPunicaWrapper):
        raise UnsupportedConfigError(
            f"LoRA adapters are not supported with {wrapper.__name__} yet: leave out enable_lora"
        )


def _products_of(wrapper: PunicaWrapperBase) -> Products:
    if isinstance(wrapper, PunicaWrapperGPU):
        return KernelProducts(wrapper)
    assert isinstance(wrapper, MaskedPunicaWrapper), "check_adapters comes first"
    return wrapper


def make_adapters(vllm_config: VllmConfig, model: Any, wrap: WrapFunction, device_ops: DeviceOps) -> Adapters:
    """Makes the adapters that ``enable_lora`` asks for."""
    if vllm_config.lora_config is None:
        return NO_ADAPTERS
    return LoRAAdapters(vllm_config, model, wrap, device_ops)
