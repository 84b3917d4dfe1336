"""Models that look up a further embedding of each token for each of their layers (Gemma 4).

Tokens of an item have those of token 0. vLLM's model looks them up while it embeds tokens, and keeps them in a buffer
until it runs. Here they are a part of the graph that uses them.
"""

from typing import Any

import torch

from model_runner_base.device_ops import DeviceOps

_BUFFER = "per_layer_embeddings"


class PerLayerEmbeddings:
    """Replaces the model's buffer; does nothing for a model without one.

    If calls must be alike (``DeviceOps.calls_alike``), the address does not change, as for ``DeepstackBuffers``.
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
