"""Further inputs of single layers: parts of an encoder's output (deepstack), or an embedding of each token."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.sequence import IntermediateTensors

from model_runner_base.device_ops import DeviceOps


class DeepstackBuffers:
    """Parts of an encoder's output that a model with deepstack (Qwen3-VL) adds after each of its first layers.

    Such an encoder's output has rows of (1 + levels) * H numbers: first the embedding, then the levels, which are added
    after layer 0, 1 and so on. vLLM's model keeps the levels in buffers between two calls, but a graph cannot. Here
    they are a part of the graph that uses them.

    If calls must be alike (``DeviceOps.calls_alike``), each level has a buffer here whose address does not change. What
    was compiled or captured in one call then reads it in all calls. A call without images finds zeros there.
    """

    def __init__(self, model: Any, model_config: ModelConfig, max_num_tokens: int, device_ops: DeviceOps) -> None:
        self.count: int = model.deepstack_num_level if getattr(model, "use_deepstack", False) else 0
        """Number of levels; 0 for a model without deepstack, of which nothing is changed."""
        dims = max_num_tokens, model_config.get_inputs_embeds_size()
        dtype: Any = model_config.dtype
        num_held = self.count if device_ops.calls_alike else 0
        self._held = [device_ops.zeros(dims, dtype) for _ in range(num_held)]
        self._bound: IntermediateTensors | None = None
        if self.count:
            assert hasattr(model, "_get_deepstack_input_embeds") and hasattr(model, "_clear_deepstack_input_embeds")
            model.deepstack_input_embeds = None
            model._get_deepstack_input_embeds = self._of_call
            model._clear_deepstack_input_embeds = lambda num_tokens: None

    def bind(self, embeddings: torch.Tensor) -> None:
        """Binds ``embeddings`` [T, levels * H], all levels of a step's tokens. Part of the graph."""
        if self.count:
            levels = embeddings.chunk(self.count, 1)
            if self._held:
                levels = tuple(held[: len(x)].copy_(x) for held, x in zip(self._held, levels, strict=True))
            self._bound = _named(levels)

    def unbind(self) -> None:
        """Releases the levels, since no tensor of a graph may outlive its tracing."""
        self._bound = None

    def _of_call(self, num_tokens: int) -> IntermediateTensors | None:
        """Levels that the model adds in this call; None for none."""
        if self._bound is None and self._held:
            return _named([held[:num_tokens].zero_() for held in self._held])
        return self._bound


def _named(levels: Sequence[torch.Tensor]) -> IntermediateTensors:
    return IntermediateTensors({f"deepstack_input_embeds_{level}": x for level, x in enumerate(levels)})


_BUFFER = "per_layer_embeddings"


class PerLayerEmbeddings:
    """Replaces the model's buffer; does nothing for a model without one.

    If calls must be alike (``DeviceOps.calls_alike``), the address does not change, as for ``DeepstackBuffers``.

    Such a model (Gemma 4) looks up a further embedding of each token for each of its layers.

    Tokens of an item have those of token 0. vLLM's model looks them up while it embeds tokens, and keeps them in a
    buffer until it runs. Here they are a part of the graph that uses them.
    """

    def __init__(self, model: Any, max_num_tokens: int, device_ops: DeviceOps) -> None:
        self._model = model
        own: torch.Tensor | None = getattr(model, _BUFFER, None)
        self._exists = own is not None
        self._held: torch.Tensor | None = None
        if own is not None:
            if device_ops.calls_alike:
                self._held = device_ops.zeros((max_num_tokens, *own.shape[1:]), own.dtype)
            model.per_layer_embeddings = self._held

    def bind(self, token_ids: torch.Tensor, is_encoded: torch.Tensor | None) -> None:
        """Binds the embeddings of a step's tokens [T]; ``is_encoded`` [T] are those of items. Part of the graph."""
        if not self._exists:
            return
        if is_encoded is not None:
            token_ids = torch.where(is_encoded, 0, token_ids)
        embeddings = self._model.get_language_model().model.get_per_layer_inputs(token_ids)
        if self._held is None:
            self._model.per_layer_embeddings = embeddings
        else:
            self._held[: len(token_ids)].copy_(embeddings)

    def unbind(self) -> None:
        """Releases the embeddings, since no tensor of a graph may outlive its tracing."""
        if self._exists:
            self._model.per_layer_embeddings = self._held
