"""Loading of a checkpoint by vLLM's own loaders, and of another one in its place; an error names the first misfit."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, update_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from model_runner_base.admission.config_fields import describe_lack
from model_runner_base.errors import CheckpointError as CheckpointError
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.checkpoint_record import ATTRIBUTE as RECORD
from model_runner_base.models.checkpoint_record import CheckpointRecord, record_of
from model_runner_base.models.draft_loading import ATTRIBUTE as DRAFT
from model_runner_base.models.draft_loading import load_draft
from model_runner_base.models.layers.cache_scales import CacheScales, has_plain_attention
from model_runner_base.models.layers.fused_moe import use_plain_experts
from model_runner_base.models.layers.latent_attention import use_plain_latents
from model_runner_base.models.layers.replaced_experts import check_activation, follow_activation
from model_runner_base.models.misfits import misfit_of_config, misfit_of_reload
from model_runner_base.models.patches.checkpoints import load_dbrx, load_olmo_hybrid, load_router_biases
from model_runner_base.models.patches.experts import adapt_experts, allow_experts_without_gate
from model_runner_base.models.patches.layers import (
    correct_modernbert,
    correct_windows,
    use_models_dtype,
    use_plain_kimi_linear,
    use_plain_unequal_heads,
)
from model_runner_base.models.quantized.configuration import reading
from model_runner_base.models.recurrent.kernels import check_kernels
from model_runner_base.models.recurrent.layers import is_plain, use_plain_recurrences
from model_runner_base.models.tower_placement import towers_left_out, towers_of
from model_runner_base.models.weight_stream import Weights, get_model, keep_all, make_loader, weights_of
from model_runner_base.vllm_compat.patches.without_indexer import num_indexed_keys
from model_runner_base.vllm_compat.probes.experts import experts_layers, wrong_in_float16
from model_runner_base.vllm_compat.types.recurrent import has_states, layer_kind

EXPLAINED = (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of a model's class that a config or a checkpoint may be at fault for."""


def load_checkpoint(vllm_config: VllmConfig, use_plain_layers: bool = True) -> nn.Module:
    """Returns the model with its weights, on the device of ``load_config``; raises CheckpointError for the first
    misfit.

    ``use_plain_layers`` puts the base's plain torch in place of layers whose kernels vLLM has for some devices only.
    """
    if has_states(vllm_config) and not use_plain_layers:
        check_kernels(vllm_config)
    if vllm_config.model_config.use_mla and not use_plain_layers:
        if num_indexed_keys(vllm_config.model_config) is not None:
            raise UnsupportedConfigError(
                "models with an indexer (DSA) run in plain torch, which this device does not use: use another model"
            )
        raise UnsupportedConfigError(
            "latent attention (MLA) runs in plain torch, which this device does not use: set VLLM_MLA_DISABLE=1, with "
            "which keys and values are kept"
        )
    # vLLM shares rotary embeddings of equal settings, and some models change theirs; the next model must not find
    # these.
    rotary_embedding._ROPE_DICT.clear()
    is_draft = False
    # vLLM's own kernels read the scales that vLLM loads.
    scales = CacheScales() if use_plain_layers and _has_small_cache(vllm_config) else None
    load_dbrx(vllm_config)
    load_router_biases()
    adapt_experts(_models_of(vllm_config), follow_activation if use_plain_layers else check_activation)
    use_models_dtype(vllm_config)
    if use_plain_layers:
        allow_experts_without_gate()
        load_olmo_hybrid(vllm_config)
        use_plain_kimi_linear(vllm_config)
        use_plain_unequal_heads(vllm_config.model_config)
    try:
        with scales.places if scales else nullcontext():
            model = get_model(vllm_config, filtered=scales.take if scales else keep_all)
        is_draft = True
        load_draft(vllm_config, model)
        is_draft = False
        assert isinstance(vllm_config.model_config.dtype, torch.dtype)
        if vllm_config.model_config.dtype == torch.float16 and (layer := wrong_in_float16(model)):
            raise UnsupportedConfigError(
                f"{layer}: vLLM adds shared experts with a wrong weight in float16: set dtype to bfloat16 or float32"
            )
        correct_modernbert(model, vllm_config.model_config.dtype)
        correct_windows(model)
        if use_plain_layers:
            use_plain_experts(model)
            use_plain_recurrences(model)
            use_plain_latents(model)
        if scales:
            scales.apply(model)
        return model
    except (NotImplementedError, UnsupportedConfigError, torch.OutOfMemoryError):
        raise  # A layer or the platform lacks something, or memory is full: no fault of the checkpoint.
    except Exception as error:
        model_config, speculation = vllm_config.model_config, vllm_config.speculative_config
        message = f"cannot load checkpoint {model_config.model}"
        if is_draft and speculation is not None:
            model_config, message = speculation.draft_model_config, f"cannot load draft {speculation.model}"
        reason = _first_line(error)
        may_be_of_config = isinstance(error, EXPLAINED) and not isinstance(error, CheckpointError)
        if may_be_of_config and (lack := describe_lack(model_config, error)):
            reason = lack if isinstance(error, AttributeError) else f"{reason}; {lack}"
            raise CheckpointError(f"{message}: {reason}") from error
        if isinstance(error, AttributeError | TypeError) or not isinstance(error, EXPLAINED):
            raise  # A fault of the code.
        if not is_draft and (misfit := misfit_of_config(model_config)) and misfit not in reason:
            reason += (
                f"; compared with transformers' model, {misfit}: save the checkpoint again, or correct config.json"
            )
        raise CheckpointError(f"{message}: {reason}") from error


def _models_of(vllm_config: VllmConfig) -> list[ModelConfig]:
    """Configs of the model, and of its draft model if there is one."""
    speculation = vllm_config.speculative_config
    draft = None if speculation is None else speculation.draft_model_config
    return [vllm_config.model_config, *([] if draft is None else [draft])]


def _has_small_cache(vllm_config: VllmConfig) -> bool:
    """Whether the KV cache has 8 bits a number."""
    return vllm_config.cache_config.cache_dtype.startswith("fp8")


def _first_line(error: Exception) -> str:
    """First line of an error's message; its repr if there is no message, as an assertion may have none."""
    return str(error).partition("\n")[0] or repr(error)


def change_config(vllm_config: VllmConfig, overrides: dict[str, dict[str, Any]]) -> None:
    """Changes fields of ``load_config``; raises ValueError for another config, and then changes nothing."""
    if others := overrides.keys() - {"load_config"}:
        raise ValueError(
            f"{', '.join(sorted(others))} cannot be changed while the engine runs, only load_config: to read another "
            "checkpoint, call reload_weights(weights_path=...)"
        )
    vllm_config.load_config = update_config(vllm_config.load_config, overrides.get("load_config", {}))


@torch.no_grad()
def reload_checkpoint(
    model: nn.Module,
    vllm_config: VllmConfig,
    weights_iterator: Weights | None = None,
    weights_path: str | None = None,
    is_checkpoint_format: bool = True,
) -> None:
    """Overwrites the weights of a loaded model where they lie, so that captured graphs see the new ones.

    Args:
        weights_iterator: names and tensors as the checkpoint has them; layers that it leaves out stay as they are.
        weights_path: a checkpoint of the same config, if there is no iterator; without either, the model's own is read
            again. It may be quantised otherwise than the model's own, if that is not served by kernels.

        Raises CheckpointError. A misfit of a checkpoint on disk is found before any weight changes, but for scales of
        an 8-bit KV cache. A layer that gets only a part of its weights keeps its old ones.
    """
    check_reloadable(model)
    if not is_checkpoint_format:
        raise CheckpointError(
            "weights in a device's own layout cannot be loaded: hand them over as the checkpoint has them, and leave "
            "out is_checkpoint_format"
        )
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    device = load_config.device or vllm_config.device_config.device
    assert device is not None
    path = weights_path or model_config.model
    scales = CacheScales() if _has_small_cache(vllm_config) and has_plain_attention(model) else None
    filtered = scales.take if scales else keep_all
    record = CheckpointRecord()
    load: Any = model.load_weights
    source = path if weights_iterator is None else model_config.model
    with reading(model_config, source), torch.device(device), _lasting_buffers_left_out(model):
        if weights_iterator is not None:
            weights = weights_of(model_config, filtered(model, weights_iterator))
        else:
            loader = make_loader(load_config, filtered, record)
            if not hasattr(loader, "get_all_weights"):
                raise CheckpointError(
                    f"load_format={load_config.load_format} cannot load a model again: hand over a weights_iterator, "
                    'or change it first, by update_config({"load_config": {"load_format": "auto"}})'
                )
            if reason := misfit_of_reload(model_config, model):
                raise CheckpointError(f"cannot load checkpoint {path}: {reason}; the model keeps its weights")
            load = record.watching(load)
            weights = loader.get_all_weights(model_config, model)
        names_by_parameter = _names_by_parameter(model)
        # Weights of towers are overwritten as they are read, since no device re-lays them.
        with towers_left_out(model):
            initialize_layerwise_reload(model)
        # From here on each layer has the parameters of a checkpoint, and tied ones are distinct.
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        _expect_transforms(model)
        try:
            with scales.places if scales else nullcontext():
                loaded = load(weights)
            _check_complete(model)
            if weights_iterator is None:
                _check_all_loaded([names & known for names in names_by_parameter], loaded)
        except Exception as error:
            for module in model.modules():
                get_layerwise_info(module).load_numel = 0  # A layer that got half of its weights keeps its old ones.
            raise CheckpointError(
                f"cannot load weights from {path}: {_first_line(error)}; some layers may hold new weights, so load "
                "again"
            ) from error
        finally:
            with towers_left_out(model):
                finalize_layerwise_reload(model, model_config)
        if record_of(model) is None:  # It started without weights.
            setattr(model, RECORD, record)
    if scales:
        try:
            scales.renew(model, is_whole=weights_iterator is None)
        except ValueError as error:
            raise CheckpointError(str(error)) from None


def check_reloadable(model: nn.Module) -> None:
    """Raises CheckpointError for weights whose loading vLLM does not record, since reloading relies on that record."""
    if hasattr(model, "pooler"):
        raise CheckpointError(
            "reload_weights of a pooling model is not supported yet: start another engine; nothing was changed"
        )
    if (name := _quantised_tower_layer(model)) is not None:
        raise CheckpointError(
            f"{name} is a quantised layer of a tower, whose reload is not supported yet: start another engine; "
            "nothing was changed"
        )
    biased = {
        name
        for name, layer in experts_layers(model)
        if layer.e_score_correction_bias is not None or layer.moe_config.has_bias
    }
    for name, layer in model.named_modules():
        if layer_kind(layer) and not is_plain(layer):
            raise CheckpointError(
                f"{name} is a recurrent layer with vLLM's kernels, whose reload is not supported yet: start "
                "another engine; nothing was changed"
            )
        if layer_kind(layer).startswith("linear"):
            raise CheckpointError(
                f"{name} is lightning attention, whose reload is not supported yet: start another engine; "
                "nothing was changed"
            )
        if name in biased or getattr(getattr(layer, "impl", None), "sinks", None) is not None:
            raise CheckpointError(
                f"{name} has biases or sinks, whose reload is not supported yet: start another engine; nothing was "
                "changed"
            )


def _quantised_tower_layer(model: nn.Module) -> str | None:
    """Name of a layer of a tower whose weights vLLM's kernels read in a layout of their own; None if there is none."""
    in_towers = {layer for tower in towers_of(model) for layer in tower.modules()}
    plain = UnquantizedLinearMethod, UnquantizedEmbeddingMethod
    for name, layer in model.named_modules() if in_towers else ():
        method = getattr(layer, "quant_method", None)
        if layer in in_towers and isinstance(method, QuantizeMethodBase) and not isinstance(method, plain):
            return name
    return None


def _names_by_parameter(model: nn.Module) -> list[set[str]]:
    """Names of each parameter that must be in a whole checkpoint: scales may be left out, and a draft has a checkpoint
    of its own."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(f"{DRAFT}.") and not name.endswith("_scale"):
            names.setdefault(id(parameter), set()).add(name)
    return list(names.values())


def _check_all_loaded(wanted: list[set[str]], loaded: set[str] | None) -> None:
    """Raises CheckpointError for a parameter that a whole checkpoint did not have; ``loaded`` are those that it had."""
    for names in wanted:
        if loaded is not None and names and not names & loaded:
            raise CheckpointError(f"{min(names)} is missing")


@contextmanager
def _lasting_buffers_left_out(model: nn.Module) -> Iterator[None]:
    """Context in which layers lack the buffers that no checkpoint has, so that vLLM neither waits for these nor
    overwrites them; layers with a method for new weights, which may make such buffers again, and towers keep theirs."""
    with towers_left_out(model):
        layers = list(model.modules())
    taken: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
    for layer in layers:
        has_weights = any(parameter is not None for parameter in layer._parameters.values())
        if has_weights and not hasattr(layer, "quant_method"):
            names = layer._non_persistent_buffers_set & layer._buffers.keys()
            taken.append((layer, {name: layer._buffers.pop(name) for name in names}))
        info = get_layerwise_info(layer)
        # Others were taken off when the model was loaded, such as a view of a convolution's weight.
        for name in info.restore_metadata[1].keys() - layer._buffers.keys():
            del info.restore_metadata[1][name]
    try:
        yield
    finally:
        for layer, buffers in taken:
            layer._buffers.update(buffers)


def _expect_transforms(model: nn.Module) -> None:
    """Has vLLM wait for what it counts twice: a weight that is transformed is copied once as it is, and once after.

    Layers of Mamba have one, and would be taken for complete before their last weight comes.
    """
    for layer in model.modules():
        for tensor in layer._parameters.values():
            if inspect.unwrap(getattr(tensor, "weight_loader", len)).__name__ == "composed_loader":
                get_layerwise_info(layer).load_numel_total += tensor.numel()  # type: ignore[operator, union-attr]


def _check_complete(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        is_part = info.load_numel_total is not None and 0 < info.load_numel < info.load_numel_total
        # Embeddings are padded: their loader fills the rest with zeros, and does not count it.
        if is_part and not isinstance(layer, VocabParallelEmbedding):
            raise CheckpointError(f"only a part of the weights of {name} was given")
