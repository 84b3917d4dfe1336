"""Weight layout for the device: linear weights transposed to [in, out]; and the product with them.

XLA:CPU multiplies a few rows by a [out, in] weight several times slower than by its transpose, and decode is a few
rows. A weight that is also an embedding table keeps its layout for look-ups and gets a transposed copy for the logits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from model_runner_base.models.layers.fused_moe import PlainExpertsMethod
from model_runner_base.models.layers.latent_attention import AbsorbedProjection
from model_runner_base.models.loader import CheckpointError
from neuron_runner import environment
from neuron_runner.allocator import give_back_freed_memory

UNPACKED_ROWS = 24
"""Largest number of rows of a fast product, measured on XLA:CPU. With one more row a product takes twice as long,
longer than two products of half the rows."""
PACKED_ROWS = 32
"""Largest number of rows for which two products are faster than one."""

GIVEN_BACK = 1 << 28
"""Bytes of weights that are moved before the memory that they had on the host is given back to the system."""


@torch.library.custom_op("neuron_runner::matmul", mutates_args=())
def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [..., in] by ``weight`` [in, out].

    An operator of its own, so that a capture with symbolic sizes leaves the choice to each size's compilation.
    """
    return product(x, weight)


@matmul.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight`` as the device does it fastest. It branches on sizes: call it where a capture does not look."""
    is_slow = x.dim() == 2 and UNPACKED_ROWS < x.shape[0] <= PACKED_ROWS
    if is_slow and not environment.neuron_device_visible():
        # Two products of half the rows.
        return torch.cat([torch.matmul(half, weight) for half in x.chunk(2)])
    return torch.matmul(x, weight)


_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
"""vLLM's scales of a layer's KV cache."""


class RelaidWeights:
    """Marks a method that lays out weights in another way than the checkpoint. The base's for experts does so too."""


class TransposedLinearMethod(RelaidWeights, UnquantizedLinearMethod):
    """Applies a weight that is stored as [in, out]."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = _transposed(layer.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = matmul(x, layer.weight)
        return out if bias is None else out + bias


class TransposedLogitsMethod(RelaidWeights, UnquantizedEmbeddingMethod):
    """Looks up in ``weight`` [vocabulary, hidden], computes logits with its transpose."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight_transposed = _transposed(layer.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = matmul(x, layer.weight_transposed)
        return out if bias is None else out + bias


def transpose_linear_weights(model: nn.Module) -> None:
    """Re-lays every unquantised linear weight of a loaded model; a later reload does the same to the new weights."""
    for module in model.modules():
        if not isinstance(module, LinearBase) or type(module.quant_method) is not UnquantizedLinearMethod:
            continue
        if module.weight.ndim == 2:  # To vLLM a short convolution is a linear layer, whose weight has three.
            module.quant_method = TransposedLinearMethod()
            module.quant_method.process_weights_after_loading(module)
    for head in logits_heads(model):
        head.quant_method = TransposedLogitsMethod()
        head.quant_method.process_weights_after_loading(head)
        # Modules that share the head's weight share the copy, which a reload renews in the one a checkpoint names.
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding) and module.weight is head.weight:
                module.quant_method = head.quant_method
                module.weight_transposed = head.weight_transposed


def move(model: nn.Module, device: torch.device, wait: Callable[[], None] = lambda: None) -> None:
    """Moves a model. Parameters stay the same objects, since others hold them too: modules that share one, and
    attention, which holds its sinks.

    vLLM's scales of quantised KV caches stay on the host: they are not read here, and vLLM sets them, one small graph
    each, whenever weights are loaded.

    ``wait`` waits for copies to the device. What the host frees is given back as the model moves, because it lies in
    pieces, of which a device in the same memory could use few: both would hold the whole model.
    """
    if device.type == "cpu":
        return  # It was loaded there.
    layers = [module for module in model.modules() if isinstance(module, Attention | MLAAttention)]
    scales = [(layer, {name: getattr(layer, name) for name in _SCALES if hasattr(layer, name)}) for layer in layers]
    torch.__future__.set_swap_module_params_on_conversion(True)
    moved = 0
    try:
        for module in model.modules():
            module._apply(lambda tensor: tensor.to(device), recurse=False)
            moved += sum(parameter.nbytes for parameter in module.parameters(recurse=False))
            if moved > GIVEN_BACK:
                wait()  # Until copied, weights stay on the host.
                give_back_freed_memory()
                moved = 0
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for module, buffers in scales:
        for name, buffer in buffers.items():
            setattr(module, name, buffer)


def refuse_loading(model: nn.Module) -> None:
    """Makes ``load_weights`` raise CheckpointError before it writes a re-laid tensor, if the model has any.

    ``reload_weights`` still works: it uses what vLLM noted about each layer before this.
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    if any(isinstance(method, (RelaidWeights, PlainExpertsMethod, AbsorbedProjection)) for method in methods):
        for parameter in model.parameters():
            parameter.weight_loader = _refuse  # type: ignore[attr-defined]


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise CheckpointError(
        "the model's weights are laid out for the device: load a checkpoint's by reload_weights(weights_iterator=...)"
    )


def _transposed(weight: Any) -> nn.Parameter:
    return nn.Parameter(weight.data.t().contiguous(), requires_grad=False)


def logits_heads(model: nn.Module) -> list[Any]:
    """The modules that the model's logits are computed with: its LM heads, or tied embeddings."""
    heads: dict[int, Any] = {
        id(module): module
        for parent in model.modules()
        for name, module in parent.named_children()
        if isinstance(module, ParallelLMHead) or (name == "lm_head" and isinstance(module, VocabParallelEmbedding))
    }
    return [head for head in heads.values() if type(head.quant_method) is UnquantizedEmbeddingMethod]
