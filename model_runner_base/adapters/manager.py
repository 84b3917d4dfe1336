"""vLLM's LoRA managers over the base's slots: which adapters are on the host, and which of those in a slot.

They load checkpoints, put LoRA layers in place of the model's own, and evict the least recently used adapter from slots
and host. What is the base's: how a slot is written (``slots.py``), what is checked before (``checks.py``), and which
layers take no adapters.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from model_runner_base.adapters.checks import Names, check_config, check_fit, widths_of
from model_runner_base.adapters.slots import SlotLayer
from model_runner_base.draft.loading import ATTRIBUTE as DRAFT
from model_runner_base.vllm_compat.probes.experts import ExpertsLayer
from model_runner_base.vllm_compat.types.speculation import read_speculation

logger = init_logger(f"vllm.{__name__}")


class SlotManager(LRUCacheLoRAModelManager):
    """The adapters on the host and in slots; one a model."""

    model: Any

    def _create_lora_modules(self) -> None:
        """Experts take none, since their LoRA layers are kernels of vLLM's; nor does what drafts, which guesses."""
        experts = {
            name.rpartition(".")[2] for name, layer in self.model.named_modules() if isinstance(layer, ExpertsLayer)
        }
        self.supported_lora_modules = [name for name in self.supported_lora_modules if name not in experts]
        draft = self.model._modules.pop(DRAFT, None)
        try:
            super()._create_lora_modules()
        finally:
            if draft is not None:
                setattr(self.model, DRAFT, draft)

    def _match_target_modules(self, module_name: str) -> bool:
        """Whether ``lora_target_modules`` names it, where vLLM has that setting."""
        is_experts = isinstance(self.model.get_submodule(module_name), ExpertsLayer)
        return not is_experts and super()._match_target_modules(module_name)

    def use_slots(self, make_layer: Callable[[BaseLayerWithLoRA], SlotLayer]) -> None:
        """From now on adapters are written by what ``make_layer`` makes of each layer."""
        layers: dict[str, BaseLayerWithLoRA] = self.modules
        self.widths = widths_of(layers, self.packed_modules)
        self.slotted = {name: make_layer(layer) for name, layer in layers.items()}
        self.modules = self.slotted  # type: ignore[assignment]
        self.replaced = [
            (parent, name, child)
            for parent in self.model.modules()
            for name, child in parent.named_children()
            if isinstance(child, BaseLayerWithLoRA)
        ]
        """Where the model's own layers were, and what stands there now."""
        for _, _, layer in self.replaced:
            if layer not in layers.values():  # Tied to another, which has the matrices of both.
                del layer.lora_a_stacked, layer.lora_b_stacked, layer.lora_a_stacked_2d

    def _pin_lora_in_gpu_cache(self, lora_id: int) -> None:
        """A pinned adapter stays on the host, and in a slot until steps need the slot: the scheduler counts on all."""
        self.activate_adapter(lora_id)

    def make_room(self, needed: Collection[int]) -> None:
        """Lets go of pinned adapters that leave the host no room for ``needed``, which a step runs with."""
        pinned = self._registered_adapters.pinned_items
        for number in sorted(pinned - set(needed)):
            if len(pinned | set(needed)) <= self.capacity:
                break
            logger.warning("LoRA adapter %d is pinned no more: max_cpu_loras has no room for it and a step's.", number)
            pinned.remove(number)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within it the model has its own layers, by the names that a checkpoint has for them."""
        for parent, name, layer in self.replaced:
            setattr(parent, name, layer.base_layer)
        try:
            yield
        finally:
            for parent, name, layer in self.replaced:
                setattr(parent, name, layer)


class _AnyName(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return True


class Checkpoint(LoRAModel):
    """An adapter's matrices, of whatever layers: ``check_fit`` names the first that the model has no place for."""

    @classmethod
    def from_local_checkpoint(  # type: ignore[override]
        cls, lora_dir: str, expected_lora_modules: Any, **options: Any
    ) -> LoRAModel:
        """vLLM's own check would list every module of such an adapter, some thousands where it is one of experts."""
        return super().from_local_checkpoint(lora_dir, _AnyName(), **options)  # type: ignore[arg-type]


class AdapterManager(LRUCacheWorkerLoRAManager):
    """vLLM's worker manager, which loads what a request names."""

    _manager_cls = SlotManager
    _adapter_manager: SlotManager

    def __init__(self, vllm_config: VllmConfig, device: torch.device, model: Any) -> None:
        super().__init__(vllm_config, device, model.embedding_modules, lora_model_cls=Checkpoint)
        # A mixed step has its decode rows beside the tokens of chunks, each with room for all drafts.
        self.max_num_batched_tokens += self.max_num_seqs * (1 + read_speculation(vllm_config).num_drafts)
        self._names = Names(bool(vllm_config.cache_config.enable_prefix_caching))
        self.create_lora_manager(model, vllm_config)

    @property
    def slots(self) -> SlotManager:
        return self._adapter_manager

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        adapter = super()._load_adapter(lora_request)
        assert self.lora_config is not None
        check_config(get_adapter_absolute_path(lora_request.lora_path), lora_request.lora_name)
        check_fit(adapter, lora_request.lora_name, self.slots.widths, self.lora_config.max_lora_rank)
        return adapter

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter unless it is there, and puts it into a slot.

        Raises ValueError and changes nothing where that cannot be.
        """
        self._names.check(lora_request, self.list_adapters())
        was_added = super().add_adapter(lora_request)
        self._names.note(lora_request)
        return was_added

    def ready(self, requests: Iterable[LoRARequest]) -> None:
        """Sees to it that these adapters, ``max_loras`` at most, are in slots at the same time."""
        needed = {request.lora_int_id: request for request in requests}
        loaded = self.list_adapters() & needed.keys()
        self.slots.make_room(needed.keys())
        for number in loaded:  # Before any is loaded, so that none of them is evicted.
            self.slots.get_adapter(number)
            self.slots.activate_adapter(number)
        for number in needed.keys() - loaded:
            self.add_adapter(needed[number])
