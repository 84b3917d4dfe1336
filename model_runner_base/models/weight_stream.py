"""Stream of weights into a model: the model's first load, its draft model's, and every reload read it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

from model_runner_base.models.checkpoint_record import ATTRIBUTE, CheckpointRecord
from model_runner_base.models.quantized.configuration import format_of_model, gguf_weights, stored_tensors
from model_runner_base.models.quantized.stored import StoredTensors
from model_runner_base.models.quantized.stream import Dequantiser
from model_runner_base.vllm_compat.patches.without_indexer import without_indexer, without_weights_of_indexer

Weights = Iterable[tuple[str, torch.Tensor]]
"""Names and tensors as a checkpoint has them."""
Filter = Callable[[nn.Module, Weights], Weights]
"""Takes tensors that the model does not load from a stream of weights."""


def keep_all(model: nn.Module, weights: Weights) -> Weights:
    """Filter that takes nothing."""
    return weights


class WeightStream:
    """Weights that the model of a config takes, of one or several chunks; few are held at once.

    Weights of a quantised checkpoint are dequantised, unless vLLM has kernels for them. Their fields may be in
    different chunks.
    """

    def __init__(self, model_config: ModelConfig, model: nn.Module, stored: StoredTensors | None = None) -> None:
        """``stored`` is the local checkpoint that the chunks are read from, if there is one."""
        self._model_config, self._model = model_config, model
        form = format_of_model(model_config)
        self._dequantiser = None if form is None else Dequantiser(form, model_config.dtype, stored)  # type: ignore[arg-type]

    @property
    def is_plain(self) -> bool:
        """Whether a chunk's tensors are the weights themselves."""
        return self._dequantiser is None

    def weights(self, source: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights of one chunk, which is what a loader reads or what was passed to a reload."""
        source = without_weights_of_indexer(self._model_config, self._model, source)
        yield from source if self._dequantiser is None else self._dequantiser.chunk(source)

    def copy_held(self) -> None:
        """Copies what is held of the chunks, so that their sender may overwrite them."""
        if self._dequantiser is not None:
            self._dequantiser.copy_held()

    def end(self) -> None:
        """Raises CheckpointError for a quantised weight that lacks a field."""
        if self._dequantiser is not None:
            self._dequantiser.end()


def weights_of(
    model_config: ModelConfig, model: nn.Module, source: Weights, stored: StoredTensors | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of a whole checkpoint."""
    stream = WeightStream(model_config, model, stored)
    yield from stream.weights(source)
    stream.end()


def make_loader(load_config: LoadConfig, filtered: Filter = keep_all, record: CheckpointRecord | None = None) -> Any:
    """Makes vLLM's loader of the configured format; if it has a stream, ``get_all_weights``, that goes through
    ``filtered``, and through ``weights_of``. ``record`` notes what is read.

    Other loaders stay as they are: dummy and sharded_state in every release of vLLM, and runai_streamer in 0.16.
    """
    loader: Any = get_model_loader(load_config)
    read = getattr(loader, "get_all_weights", None)
    if read is not None:
        record = record or CheckpointRecord()

        def get_all_weights(model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
            file = gguf_weights(model_config)
            source = read(model_config, model) if file is None else file.weights(model_config.dtype)  # type: ignore[arg-type]
            source, stored = filtered(model, record.read(source)), stored_tensors(model_config)
            return record.offer(weights_of(model_config, model, source, stored))

        loader.get_all_weights = get_all_weights
    return loader


def get_model(
    vllm_config: VllmConfig,
    model_config: ModelConfig | None = None,
    prefix: str = "",
    filtered: Filter = keep_all,
) -> nn.Module:
    """Returns the model with its weights and its record, as vLLM's function of this name does; ``model_config`` is that
    of a draft model, and ``filtered`` takes weights from the stream that no model has."""
    record, own = CheckpointRecord(), model_config or vllm_config.model_config
    loader = make_loader(vllm_config.load_config, filtered, record)
    loader.load_weights = record.watching(loader.load_weights)
    with without_indexer(own):
        model: nn.Module = loader.load_model(vllm_config=vllm_config, model_config=own, prefix=prefix)
    setattr(model, ATTRIBUTE, record)
    return model
