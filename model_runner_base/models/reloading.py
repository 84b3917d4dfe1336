"""Overwriting of a loaded model's weights, in chunks or from a checkpoint; an error names the first misfit."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layer_tensors, get_layerwise_info

from model_runner_base.errors import CheckpointError, first_line
from model_runner_base.models.checkpoint_record import ATTRIBUTE as RECORD
from model_runner_base.models.checkpoint_record import CheckpointRecord, record_of
from model_runner_base.models.draft_loading import ATTRIBUTE as DRAFT
from model_runner_base.models.layers.cache_scales import CacheScales, has_plain_attention, has_small_cache
from model_runner_base.models.misfits import misfit_of_reload
from model_runner_base.models.quantized.configuration import reading
from model_runner_base.models.recurrent.layers import is_plain
from model_runner_base.models.tower_placement import towers_left_out, towers_of
from model_runner_base.models.weight_stream import Weights, WeightStream, keep_all, make_loader
from model_runner_base.vllm_compat.probes.experts import IS_ONE_MODULE, experts_layers
from model_runner_base.vllm_compat.types.recurrent import layer_kind
from model_runner_base.vllm_compat.types.weight_transfer import chunk_of_weights

Load = Callable[[Weights], None]
"""Loads a chunk: names and tensors as a checkpoint has them."""


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
    if weights_iterator is None:
        _reload_stored(model, vllm_config, weights_path or vllm_config.model_config.model)
        return
    reload = _Reload(model, vllm_config, vllm_config.model_config, "given weights")
    with reload.running():
        reload.load(weights_iterator)


@contextmanager
def reloading(
    model: nn.Module,
    vllm_config: VllmConfig,
    model_config: ModelConfig | None = None,
    target: nn.Module | None = None,
) -> Iterator[Load]:
    """Yields a function that loads chunks of weights, in place of the old ones; layers that no chunk has stay as they
    are.

    The model must not run inside the block: a layer gets its new weights when it is complete, and until then it has
    none. Afterwards, also after an error, each layer has either its old or its new ones.

    A tensor of a chunk is no longer needed once the function has returned. Raises CheckpointError. If a chunk is a
    list, and the checkpoint is not quantised, a shape that does not fit is found before a weight of the chunk changes.

    Args:
        model_config: the config of a draft model, where ``model`` is one.
        target: the model that a draft model drafts for; weights of layers that the two share are passed over.
    """
    check_reloadable(model)
    reload = _Reload(model, vllm_config, model_config or vllm_config.model_config, "given weights")

    def load(weights: Weights) -> None:
        reload.load(weights)
        reload.own_weights()

    with reload.running(), _passing_over(_shared_layers(model, target)):
        yield load


def _shared_layers(draft: nn.Module, target: nn.Module | None) -> set[nn.Module]:
    """Layers of a draft model that are also its target's, such as embeddings; the target has the draft as a part."""
    if target is None:
        return set()
    of_target = {layer for _, layer in target.named_modules(memo={draft})}
    return of_target & {*draft.modules()}


@contextmanager
def _passing_over(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which the loaders of layers load nothing. vLLM uses their tensors without numbers in later reloads,
    too, so these get their loaders back."""
    tensors: list[Any] = [tensor for layer in layers for tensor in get_layer_tensors(layer).values()]
    loaders = [(tensor, tensor.weight_loader) for tensor in tensors if hasattr(tensor, "weight_loader")]
    for tensor, _ in loaders:
        tensor.weight_loader = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for tensor, loader in loaders:
            tensor.weight_loader = loader


def _reload_stored(model: nn.Module, vllm_config: VllmConfig, path: str) -> None:
    """Reads the checkpoint at ``path`` with vLLM's loader, as a start would."""
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    with reading(model_config, path):
        record = CheckpointRecord()
        reload = _Reload(model, vllm_config, model_config, path)
        loader = make_loader(load_config, reload.filtered, record)
        if not hasattr(loader, "get_all_weights"):
            raise CheckpointError(
                f"load_format={load_config.load_format} cannot load a model again: hand over a weights_iterator, "
                'or change it first, by update_config({"load_config": {"load_format": "auto"}})'
            )
        if reason := misfit_of_reload(model_config, model):
            raise CheckpointError(f"cannot load checkpoint {path}: {reason}; the model keeps its weights")
        reload.is_whole = True
        with reload.running():
            reload.load_ready(loader.get_all_weights(model_config, model), record.watching)
        if record_of(model) is None:  # It started without weights.
            setattr(model, RECORD, record)


class _Reload:
    """Overwriting of the weights of one model."""

    is_whole = False
    """Whether every weight is given, so that none may be missing."""

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, model_config: ModelConfig, source: str) -> None:
        """``source`` says in errors where the weights come from."""
        self._model: Any = model
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._source = source
        self._device = vllm_config.load_config.device or vllm_config.device_config.device
        is_target = model_config is vllm_config.model_config
        has_scales = is_target and has_small_cache(vllm_config) and has_plain_attention(model)
        self._scales = CacheScales() if has_scales else None
        self.filtered = self._scales.take if self._scales else keep_all
        self._stream = WeightStream(model_config, model)
        record = record_of(model)
        self._shapes: Mapping[str, list[int]] = record.shapes if record else {}
        self._loaded: set[str] | None = set()
        """Names of parameters that got weights; None if the model does not say."""
        self._has_begun = False
        """Whether a tensor was given to the model."""
        self._num_owned: dict[nn.Module, int] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which chunks are loaded, after which the model can run."""
        model = self._model
        with _lasting_buffers_left_out(model):
            with self._loading():
                names_by_parameter = _names_by_parameter(model)
                # Weights of towers are overwritten as they are read, since no device re-lays them.
                with towers_left_out(model):
                    initialize_layerwise_reload(model)
                # From here on each layer has the parameters of a checkpoint, and tied ones are distinct.
                known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
                _expect_transforms(model)
            try:
                yield
                self._stream.end()
                _check_complete(model)
                if self.is_whole:
                    _check_all_loaded([names & known for names in names_by_parameter], self._loaded)
            except Exception as error:
                for layer in model.modules():  # One that got half of its weights keeps its old ones.
                    get_layerwise_info(layer).load_numel = 0
                raise self._explained(error) from error
            finally:
                with self._loading(), towers_left_out(model):
                    finalize_layerwise_reload(model, self._model_config)
        if self._scales:
            try:
                self._scales.renew(model, is_whole=self.is_whole)
            except ValueError as error:
                raise CheckpointError(str(error)) from None

    def load(self, weights: Weights) -> None:
        """Loads a chunk of tensors as they are stored."""
        if isinstance(weights, Sequence) and self._stream.is_plain:
            for name, tensor in weights:
                self._check(name, tensor)
        self.load_ready(self._fitting(self._stream.weights(self.filtered(self._model, weights))))

    def load_ready(self, weights: Weights, watching: Callable[..., Any] = lambda load: load) -> None:
        """Loads weights that went through the filter and the stream."""
        with self._loading(), self._scales.places if self._scales else nullcontext():
            loaded = watching(self._model.load_weights)(weights)
        if loaded is None:
            self._loaded = None
        elif self._loaded is not None:
            self._loaded |= loaded

    def own_weights(self) -> None:
        """Copies the tensors that layers hold until they are complete, so that their sender may overwrite them."""
        self._stream.copy_held()
        for layer in self._model.modules():
            held = get_layerwise_info(layer).loaded_weights
            for _, call in held[self._num_owned.get(layer, 0) :]:
                # The parameter itself is one of vLLM's, without numbers.
                given = {key: each for key, each in call.arguments.items() if torch.is_tensor(each) and key != "param"}
                call.arguments.update({key: tensor.detach().clone() for key, tensor in given.items()})
            self._num_owned[layer] = len(held)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Context of each piece of work, and not of the time between two: torch's modes are the thread's."""
        assert self._device is not None
        chunk = nullcontext() if self.is_whole else chunk_of_weights()
        with torch.no_grad(), torch.device(self._device), set_current_vllm_config(self._vllm_config), chunk:
            yield

    def _fitting(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields weights that have the shapes of those that the model was loaded with."""
        for name, tensor in weights:
            self._check(name, tensor)
            self._has_begun = True
            yield name, tensor

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises CheckpointError for a tensor of another shape than the one of its name that the model was loaded
        with."""
        shape = self._shapes.get(name)
        if shape is not None and list(tensor.shape) != shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, and must have {shape}")

    def _explained(self, error: Exception) -> CheckpointError:
        state = "the model keeps its weights"
        if self._has_begun or self.is_whole:
            state = "some layers may hold new weights, so load again"
        source = f"weights from {self._source}" if self.is_whole else self._source
        return CheckpointError(f"cannot load {source}: {first_line(error)}; {state}")


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
    of_ranks = {name for name, layer in experts_layers(model) if IS_ONE_MODULE and layer.expert_map is not None}
    for name, layer in model.named_modules():
        if name in of_ranks:
            raise CheckpointError(
                f"{name} has the experts of one rank (enable_expert_parallel), whose reload needs vLLM 0.33: start "
                "another engine; nothing was changed"
            )
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
        is_partial = info.load_numel_total is not None and 0 < info.load_numel < info.load_numel_total
        # Embeddings are padded: their loader fills the rest with zeros, and does not count it.
        if is_partial and not isinstance(layer, VocabParallelEmbedding):
            raise CheckpointError(f"only a part of the weights of {name} was given")
