"""Activations inside poolers, which belong to the checkpoint and not to a request."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.bert import BertPooler
from vllm.model_executor.models.modernbert import ModernBertPooler


def keep_inner_activations(model: nn.Module) -> None:
    """Makes the activation of BERT's and ModernBERT's pooler a part of its projection, which every request gets.

    In vLLM a request with ``use_activation=False`` loses this activation, too, so its logits are not those of the
    checkpoint.
    """
    for module in model.modules():
        head: Any = module.head if isinstance(module, BertPooler | ModernBertPooler) else None
        if head is not None and head.activation is not None:
            head.projector = _ActivatedProjection(head.projector, head.activation)
            head.activation = None


class _ActivatedProjection:
    """A projection, then its activation."""

    def __init__(self, project: Any, activate: Any) -> None:
        self._project = project
        self._activate = activate

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._activate(self._project(rows))
