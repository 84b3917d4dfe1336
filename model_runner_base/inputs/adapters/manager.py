"""vLLM's LoRA managers with the base's slots: they decide which adapters are on the host, and which are in a slot.

vLLM's managers load checkpoints, put LoRA layers in place of the model's own, and evict the least recently used adapter
from slots and host. The base adds how a slot is written (``slots.py``), checks before an adapter is loaded
(``admission/adapter_checks.py``), and the choice of layers that take no adapters.
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
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.linear import LinearBase

from model_runner_base.admission.adapter_checks import Names, check_config, check_fit, widths_of
from model_runner_base.heads.pooling.placement import pooler_modules
from model_runner_base.inputs.adapters.experts import ExpertsSlots, NamedExperts
from model_runner_base.inputs.adapters.latents import adapt_projections, with_weights
from model_runner_base.inputs.adapters.slots import SlotLayer
from model_runner_base.models.draft_loading import ATTRIBUTE as DRAFT
from model_runner_base.vllm_compat.probes.experts import ExpertsLayer, ExpertsView, experts_layers
from model_runner_base.vllm_compat.types.recurrent import rename_adapters
from model_runner_base.vllm_compat.types.speculation import read_speculation

logger = init_logger(f"vllm.{__name__}")


class SlotManager(LRUCacheLoRAModelManager):
    """Keeps the adapters on the host and in slots; there is one for each model."""

    model: Any

    def _create_lora_modules(self) -> None:
        """Makes LoRA layers, but none for the draft model and the pooler, and finds the experts that take adapters.

        LoRA layers of experts need vLLM's kernels, so ``experts.py`` has their adapters. Drafts are guesses, which need
        no adapter. Poolers run on the host.
        """
        own = pooler_modules(self.model)
        without = {
            name.rpartition(".")[2]
            for name, layer in self.model.named_modules()
            if isinstance(layer, ExpertsLayer) or any(layer is each for each in own)
        }
        self.supported_lora_modules = [name for name in self.supported_lora_modules if name not in without]
        self.supported_modules_to_save: set[str] = set()
        """Whole layers that vLLM takes from an adapter, in releases that take classifiers; none here."""
        draft = self.model._modules.pop(DRAFT, None)
        try:
            with with_weights(self.model):
                super()._create_lora_modules()
            self._replace_everywhere()
            adapt_projections(self.model)
            self._find_experts()
        finally:
            if draft is not None:
                setattr(self.model, DRAFT, draft)

    def _find_experts(self) -> None:
        self.experts: dict[str, NamedExperts] = {}
        self.without: dict[str, str] = {}
        """Layers of experts that take no adapters, and why."""
        for name, layer in experts_layers(self.model):
            wrapper = self._get_punica_wrapper(name)
            is_wanted = getattr(self.lora_config, "target_modules", None) is None or super()._match_target_modules(name)
            if wrapper is not None and is_wanted:
                experts = self._named(name, layer)
                reason = experts.unsupported_reason(self.lora_config, isinstance(wrapper, PunicaWrapperGPU))
                if reason:
                    self.without[name] = reason
                else:
                    self.experts[name] = experts

    def _named(self, name: str, layer: ExpertsView) -> NamedExperts:
        if self._is_3d_moe_model:
            return NamedExperts(layer, (f"{name}.base_layer", name))
        parent, _, last = name.rpartition(".")
        start = f"{parent.rpartition('.')[2]}.{last}."  # GraniteMoeHybrid's mapping has the parent's name, too.
        mapping = self.packed_modules_mapping.get(last, ())
        names = [last + each.removeprefix(start[:-1]) if each.startswith(start) else each for each in mapping]
        return NamedExperts(layer, [f"{parent}.{each}" for each in names])

    def _match_target_modules(self, module_name: str) -> bool:
        """Whether the layer takes adapters: it is a matrix, not one of experts, and ``lora_target_modules`` allows
        it."""
        layer = self.model.get_submodule(module_name)
        weight: Any = getattr(layer, "weight", None)
        # A convolution is one of vLLM's linear layers, with a weight of three dimensions.
        is_convolution = isinstance(layer, LinearBase) and weight is not None and weight.dim() == 3
        is_matrix = not is_convolution and not isinstance(layer, ExpertsLayer)
        return is_matrix and super()._match_target_modules(module_name)

    def use_slots(self, make_layer: Callable[[Any], SlotLayer]) -> None:
        """Makes ``make_layer``'s layers write adapters from now on, each for a LoRA layer of vLLM's, or for experts."""
        layers: dict[str, BaseLayerWithLoRA] = self.modules
        widths = widths_of(layers, self.packed_modules)
        self.slotted = {name: make_layer(layer) for name, layer in layers.items()}
        for name, experts in self.experts.items():
            slots = self.slotted[name] = make_layer(experts)
            assert isinstance(slots, ExpertsSlots)
            widths |= slots.widths()
        if self.is_pooling_model:  # Its adapters may have the names of a model without a head.
            widths |= {
                name.removeprefix("model."): each._replace(needs=each.needs.removeprefix("model."))
                for name, each in widths.items()
            }
            self.without |= {name.removeprefix("model."): reason for name, reason in self.without.items()}
        self.widths = widths
        self.takes_parameters: bool = self._is_3d_moe_model
        """Whether a checkpoint has all experts' matrices in one, even if the experts take no adapters."""
        self.modules = self.slotted  # type: ignore[assignment]
        self.replaced = [
            (parent, name, child)
            for parent in self.model.modules()
            for name, child in parent.named_children()
            if isinstance(child, BaseLayerWithLoRA)
        ]
        """LoRA layers, with the parent module and the name at which each has replaced one of the model's own."""
        for _, _, layer in self.replaced:
            if layer not in layers.values():  # Tied to another layer, which has the matrices of both.
                del layer.lora_a_stacked, layer.lora_b_stacked, layer.lora_a_stacked_2d

    def _replace_everywhere(self) -> None:
        """Puts each LoRA layer in all places where the model has the matrix that it replaced, and keeps its first name.

        A model may name a layer twice: experts hold the shared ones, these the gate of their outputs, and latent
        attention a block's projections. vLLM may make a LoRA layer for each name; the first stays.
        """
        first: dict[Any, BaseLayerWithLoRA] = {}
        distinct: dict[str, BaseLayerWithLoRA] = {}
        for name, layer in self.modules.items():
            base = layer.base_layer  # type: ignore[attr-defined]
            matrix: Any = base if isinstance(base, LinearBase) else layer
            if matrix not in first:
                first[matrix] = distinct[name] = layer
        self.modules = distinct
        for parent in list(self.model.modules()):
            for name, child in parent.named_children():
                matrix = child.base_layer if isinstance(child, BaseLayerWithLoRA) else child  # type: ignore[attr-defined]
                if matrix in first and not isinstance(parent, BaseLayerWithLoRA):
                    setattr(parent, name, first[matrix])

    def _create_merged_loras_inplace(self, lora_model: LoRAModel) -> None:
        """Packs an adapter's matrices by layer: those of experts for ``ExpertsSlots``, others as vLLM does."""
        for name, slots in self.slotted.items():
            if isinstance(slots, ExpertsSlots):
                found = [self._get_lora_layer_weights(lora_model, each) for each in slots.names]
                if taken := {id(weights) for weights in found if weights is not None}:
                    others = {key: weights for key, weights in lora_model.loras.items() if id(weights) not in taken}
                    lora_model.loras = {**others, name: slots.pack(name, found)}
        super()._create_merged_loras_inplace(lora_model)

    def _pin_lora_in_gpu_cache(self, lora_id: int) -> None:
        """Puts a pinned adapter into a slot, which steps may still take, as the scheduler counts on all slots.

        On the host it stays.
        """
        self.activate_adapter(lora_id)

    def unpin_for(self, needed: Collection[int]) -> None:
        """Unpins adapters if ``max_cpu_loras`` is too small for them and for ``needed``, which a step runs with."""
        pinned = self._registered_adapters.pinned_items
        for number in sorted(pinned - set(needed)):
            if len(pinned | set(needed)) <= self.capacity:
                break
            logger.warning("LoRA adapter %d is no longer pinned: a step needs its place in max_cpu_loras.", number)
            pinned.remove(number)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context in which the model has its own layers, with the names of its checkpoint."""
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
    """An adapter's matrices, for any layers; ``check_fit`` raises for the first that the model has no layer for."""

    @classmethod
    def from_local_checkpoint(  # type: ignore[override]
        cls, lora_dir: str, expected_lora_modules: Any, **options: Any
    ) -> LoRAModel:
        """Loads without vLLM's own check, whose message lists all such modules: thousands in an adapter of experts."""
        return super().from_local_checkpoint(lora_dir, _AnyName(), **options)  # type: ignore[arg-type]


class AdapterManager(LRUCacheWorkerLoRAManager):
    """vLLM's worker manager, which loads the adapters that requests name."""

    _manager_cls = SlotManager
    _adapter_manager: SlotManager

    def __init__(self, vllm_config: VllmConfig, device: torch.device, model: Any) -> None:
        super().__init__(vllm_config, device, model.embedding_modules, lora_model_cls=Checkpoint)
        # A mixed step has the tokens of chunks and, in addition, decode rows with places for all drafts.
        self.max_num_batched_tokens += self.max_num_seqs * (1 + read_speculation(vllm_config).num_drafts)
        rename_adapters(model)
        self._names = Names(bool(vllm_config.cache_config.enable_prefix_caching))
        self.create_lora_manager(model, vllm_config)

    @property
    def slots(self) -> SlotManager:
        return self._adapter_manager

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        adapter = super()._load_adapter(lora_request)
        assert self.lora_config is not None
        widths, name = self.slots.widths, lora_request.lora_name
        check_config(get_adapter_absolute_path(lora_request.lora_path), name, self.slots.takes_parameters)
        check_fit(adapter, name, widths, self.lora_config.max_lora_rank, self.slots.without)
        return adapter

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter unless it is loaded, and puts it into a slot.

        Raises ValueError, and changes nothing, if it cannot serve.
        """
        self._names.check(lora_request, self.list_adapters())
        was_added = super().add_adapter(lora_request)
        self._names.note(lora_request)
        return was_added

    def ready(self, requests: Iterable[LoRARequest]) -> None:
        """Puts these adapters, ``max_loras`` at most, into slots, all at the same time."""
        needed = {request.lora_int_id: request for request in requests}
        loaded = self.list_adapters() & needed.keys()
        self.slots.unpin_for(needed.keys())
        for number in loaded:  # Used before others are loaded, so that none of them is evicted.
            self.slots.get_adapter(number)
            self.slots.activate_adapter(number)
        for number in needed.keys() - loaded:
            self.add_adapter(needed[number])
