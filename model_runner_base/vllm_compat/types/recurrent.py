"""vLLM's recurrent layers, and the models that have them."""

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

from model_runner_base.vllm_compat.types.speculation import HOST_METHODS, read_speculation

RENAMED = {
    "Lfm2ForCausalLM": {".conv.": ".short_conv.", ".w1.": ".w1_alone."},
    "FalconH1ForCausalLM": {".mamba.": ".mamba.mamba."},
}
"""Parts of layers' names in a checkpoint, and in vLLM's model, by classes that may not tell vLLM's LoRA managers."""
WITH_DRAFTING_LAYERS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Models with recurrent layers whose layers of multi-token prediction are supported."""
HAS_OTHER_DELTA_KERNELS = find_spec("vllm.model_executor.layers.mamba.gdn") is not None
"""Whether vLLM's gated delta nets have the kernels of newer releases, which were not tried."""


def rename_adapters(model: Any) -> None:
    """Makes vLLM's LoRA managers find the layers of a model by their names in a checkpoint."""
    renamed = RENAMED.get(type(model).__name__, {})
    if not renamed or getattr(model, "hf_to_vllm_mapper", None):  # Newer releases have some.
        return
    model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr=renamed)
    if ".w1." in renamed:
        # vLLM's layer w1 is w1 and w3 of the checkpoint, and vLLM takes the packed adapter for its part of that name.
        model.packed_modules_mapping = model.packed_modules_mapping | {"w1": ["w1_alone", "w3"]}


def has_states(vllm_config: VllmConfig) -> bool:
    """Whether a model has recurrent layers, alone or among layers of attention."""
    model = vllm_config.model_config
    return bool(model and (model.is_attention_free or model.is_hybrid))


def recurrent_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Recurrent layers by name."""
    return get_layers_from_vllm_config(vllm_config, MambaBase)  # type: ignore[type-abstract]


def keeps_prefixes(vllm_config: VllmConfig) -> bool:
    """Whether states are kept for later requests with the same prefix: prefix caching of a model with such layers."""
    return has_states(vllm_config) and bool(vllm_config.cache_config.enable_prefix_caching)


def num_states(vllm_config: VllmConfig) -> int:
    """Number of states of each layer: one for each request that may run, or several where prefixes are kept."""
    count = vllm_config.scheduler_config.max_num_seqs
    if not keeps_prefixes(vllm_config):
        return count
    # ``states_per_request`` of the scheduler (scheduling/state_group.py).
    tokens = 2 * (1 + read_speculation(vllm_config).num_drafts)
    return count * (2 + -(-tokens // vllm_config.cache_config.block_size))


def num_places(vllm_config: VllmConfig) -> int:
    """Number of places for states in each layer's tensors, those of padding included.

    Where drafts are verified, each state has a place for every token of a decode row.
    """
    return (1 + num_states(vllm_config)) * (1 + read_speculation(vllm_config).num_drafts)


def draft_methods(model: ModelConfig) -> tuple[str, ...]:
    """Speculative methods that serve a model with recurrent layers."""
    return (*HOST_METHODS, "mtp") if model.architecture in WITH_DRAFTING_LAYERS else HOST_METHODS


def layer_kind(layer: Any) -> str:
    """vLLM's name of a layer's kind, in lower case, such as "mamba2"; "" for a layer that is not recurrent."""
    kind = getattr(layer, "mamba_type", "")  # Newer releases have an enumeration.
    return str(getattr(kind, "name", kind)).lower()


def is_delta_net(layer: Any) -> bool:
    """Whether a recurrent layer is a gated delta net."""
    return layer_kind(layer).startswith("gdn")


def state_shapes(layer: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Shapes of what a recurrent layer keeps of a request: of its convolution, and of its recurrence.

    Each list has one entry, or none if the layer has no such part: convolutions of equal length are kept as one. Where
    drafts are verified, some of vLLM's layers keep as many inputs of a convolution more, which are not counted.
    """
    shapes = [tuple(shape) for shape in layer.get_state_shape()]
    is_linear = layer_kind(layer).startswith("linear")
    count = 0 if is_linear else max(1, len(shapes) - 1)
    inputs, recurrences = shapes[:count], shapes[count:]
    further = getattr(layer, "num_spec", 0)
    return [(inputs[0][0] - further, sum(width for _, width in inputs))] if inputs else [], recurrences


def kernel_spec(layer: Any, max_model_len: int) -> MambaSpec:
    """KV-cache spec with which vLLM makes the metadata builder of a recurrent layer's kernels; a request has one
    block."""
    return MambaSpec(
        block_size=max_model_len,
        shapes=tuple(map(tuple, layer.get_state_shape())),
        dtypes=tuple(layer.get_state_dtype()),  # type: ignore[arg-type]
        mamba_type=layer.mamba_type,
    )


def choose_kernels(vllm_config: VllmConfig, specs: dict[str, MambaSpec]) -> None:
    """Settles what vLLM's kernels of recurrent layers read of the config.

    Newer releases choose the kernel of Mamba's decode rows once the layers' specs are known.
    """
    if vllm_config.cache_config.mamba_block_size is None:
        vllm_config.cache_config.mamba_block_size = vllm_config.model_config.max_model_len
    name = "vllm.model_executor.layers.mamba.ops.ssu_dispatch"
    if find_spec(name):
        config: Any = vllm_config
        groups = [KVCacheGroupSpec([layer], spec) for layer, spec in specs.items()]
        import_module(name).initialize_mamba_ssu_backend(config.mamba_config, SimpleNamespace(kv_cache_groups=groups))
