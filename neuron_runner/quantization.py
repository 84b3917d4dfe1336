"""int8 weights: a quarter of float32's memory, half of bfloat16's.

A weight is stored as whole numbers from -127 to 127 and one float32 scale for each output channel, its largest
magnitude divided by 127 (for experts, one for each expert's channel; for an embedding, one for each row). Activations
stay as they are: a product multiplies them with the whole numbers, which float32 and bfloat16 both hold exactly, then
with the scales.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.layers.fused_moe import ACTIVATIONS, PlainExpertsMethod
from model_runner_base.vllm_compat.patches.without_indexer import hides_keys
from model_runner_base.vllm_compat.probes.experts import ExpertsLayer
from neuron_runner import environment
from neuron_runner.weights import RelaidWeights, logits_heads, product

LARGEST = 127


def quantize(weight: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` as int8, and the float32 scales, which lack the dimension ``dim`` that each of them spans."""
    weight = weight.float()
    largest = weight.abs().amax(dim)
    is_zero = largest <= LARGEST * torch.finfo(torch.float32).tiny  # Or too small for a normal float32 as its scale.
    scale = torch.where(is_zero, 1.0, largest / LARGEST)
    return (weight / scale.unsqueeze(dim)).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


@torch.library.custom_op("neuron_runner::int8_matmul", mutates_args=())
def int8_matmul(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x`` [..., M, in] by ``weight`` int8 [..., in, out], each column times its ``scale`` [..., out], as ``x.dtype``.

    On XLA:CPU the whole numbers become floats in a temporary of their own. XLA would make those of all layers at once,
    for they depend on nothing. So each is made to wait for ``x``: a zero that depends on ``x`` is added. And XLA would
    multiply a single row number by number, so there are two rows of the same.
    """
    rows = x
    if x.device.type == "xla" and not environment.neuron_device_visible():
        weight = weight + (x.reshape(-1)[0] < -torch.inf).to(torch.int8)
        if x.shape[-2] == 1:
            rows = torch.cat([x, x], dim=-2)
    out = product(rows, weight.to(x.dtype)) * scale.unsqueeze(-2)
    return out[..., : x.shape[-2], :].to(x.dtype)


@int8_matmul.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, weight.to(x.dtype))


class Int8LinearMethod(RelaidWeights, UnquantizedLinearMethod):
    """``weight`` int8 [in, out], ``weight_scale`` float32 [out]."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight, layer.weight_scale = _parameters(layer.weight.data.t(), dim=0)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = int8_matmul(x, layer.weight, layer.weight_scale)
        return out if bias is None else out + bias


class Int8EmbeddingMethod(RelaidWeights, UnquantizedEmbeddingMethod):
    """Looks up in ``weight`` int8 [vocabulary, hidden], ``weight_scale`` float32 [vocabulary]."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight, layer.weight_scale = _parameters(layer.weight.data, dim=1)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = int8_matmul(x, self.columns(layer), layer.weight_scale)
        return out if bias is None else out + bias

    def columns(self, layer: Any) -> torch.Tensor:
        """[hidden, vocabulary]"""
        return layer.weight.t()

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        return (layer.weight[input_] * layer.weight_scale[input_].unsqueeze(-1)).to(self.dtype)


class Int8LogitsMethod(Int8EmbeddingMethod):
    """Computes logits with a copy, ``weight_transposed`` int8 [hidden, vocabulary].

    XLA:CPU is ten times slower with the other layout.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.weight_transposed = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)

    def columns(self, layer: Any) -> torch.Tensor:
        return layer.weight_transposed


class Int8Experts(NamedTuple):
    """The weights of E experts in int8, with the methods that ``run_experts`` calls."""

    gate_up: torch.Tensor
    """int8 [E, hidden, 2 * inner]"""
    gate_up_scale: torch.Tensor
    """float32 [E, 2 * inner]"""
    down: torch.Tensor
    """int8 [E, inner, hidden]"""
    down_scale: torch.Tensor
    """float32 [E, hidden]"""
    activation: str
    gate_up_bias: torch.Tensor | None = None
    """[E, 2 * inner]"""
    down_bias: torch.Tensor | None = None
    """[E, hidden]"""

    def take(self, ids: torch.Tensor) -> "Int8Experts":
        """The weights of the experts ``ids``, copied."""
        taken: Any = (value[ids] if isinstance(value, torch.Tensor) else value for value in self)
        return Int8Experts(*taken)

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """[E, M, hidden] to the same, each expert on its own inputs; [1, M, hidden] gives all experts the same."""
        inner = int8_matmul(inputs, self.gate_up, self.gate_up_scale)
        if self.gate_up_bias is not None:
            inner = inner + self.gate_up_bias.unsqueeze(1)
        out = int8_matmul(ACTIVATIONS[self.activation](inner), self.down, self.down_scale)
        return out if self.down_bias is None else out + self.down_bias.unsqueeze(1)


class Int8ExpertsMethod(PlainExpertsMethod):
    """Keeps the weights as ``Int8Experts`` has them."""

    experts_type = Int8Experts

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        self.quantize(layer)

    def quantize(self, layer: Any) -> None:
        layer.w13_weight, layer.w13_weight_scale = _parameters(layer.w13_weight.data, dim=1)
        layer.w2_weight, layer.w2_weight_scale = _parameters(layer.w2_weight.data, dim=1)

    def experts(self, layer: Any) -> Int8Experts:  # type: ignore[override]
        plain = super().experts(layer)
        return Int8Experts(
            plain.gate_up,
            layer.w13_weight_scale,
            plain.down,
            layer.w2_weight_scale,
            plain.activation,
            plain.gate_up_bias,
            plain.down_bias,
        )


def check_quantizable(model_config: ModelConfig) -> None:
    """Raises UnsupportedConfigError for a checkpoint that some method has quantised already, and for an indexer."""
    if hides_keys(model_config):
        raise UnsupportedConfigError(
            "an indexer (sparse attention, DSA) is not stored as int8 yet: leave out quant_dtype, or set max_model_len "
            "to index_topk or less"
        )
    if model_config.quantization is not None:
        raise UnsupportedConfigError(
            f"the checkpoint is quantised already ({model_config.quantization}), so it cannot be stored as int8: leave "
            "out quant_dtype, or use the checkpoint that it was made from"
        )


def quantize_weights(model: nn.Module) -> None:
    """Stores a loaded model's linear, embedding and expert weights as int8; a later reload does so to the new ones.

    Norms, biases, convolutions and the routers of expert layers stay as they are.
    """
    routers = _routers(model)
    heads = logits_heads(model)
    layer: Any
    for layer in model.modules():
        if isinstance(layer, ExpertsLayer):
            layer.quant_method = Int8ExpertsMethod(layer.moe_config)
            layer.quant_method.quantize(layer)
        elif layer not in routers and _is_plain_linear(layer):
            _use(Int8LinearMethod(), layer)
    embeddings: list[Any] = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for layer in [*heads, *(embedding for embedding in embeddings if embedding not in heads)]:
        if type(layer.quant_method) is UnquantizedEmbeddingMethod:
            sharing = [other for other in embeddings if other.weight is layer.weight]
            method = Int8LogitsMethod if layer in heads else Int8EmbeddingMethod
            _use(method(layer.weight.dtype), layer)
            # Modules that share a weight share its int8 form, which a reload renews in the one that a checkpoint names.
            for other in sharing:
                other.quant_method = layer.quant_method
                for name, parameter in layer.named_parameters(recurse=False):
                    if name.startswith("weight"):
                        setattr(other, name, parameter)


def _is_plain_linear(layer: Any) -> bool:
    """Whether a layer multiplies by a matrix; a convolution, a linear layer to vLLM, has a weight of three dims."""
    return type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod and layer.weight.ndim == 2


def largest_float_bytes(model: nn.Module) -> int:
    """Bytes of the largest int8 weight as float32: multiplying by it takes that much in addition to the weights."""
    sizes = [weight.numel() for weight in model.parameters() if weight.dtype == torch.int8]
    return max(sizes, default=0) * torch.float32.itemsize


def _routers(model: nn.Module) -> set[nn.Module]:
    """The linear layers that choose experts. They are small, and a rounded score may choose another expert."""
    return {
        layer
        for parent in model.modules()
        if any(isinstance(child, ExpertsLayer) for child in parent.children())
        for layer in parent.children()
        if isinstance(layer, ReplicatedLinear)
    }


def _use(method: Any, layer: Any) -> None:
    layer.quant_method = method
    method.process_weights_after_loading(layer)


def _parameters(weight: torch.Tensor, dim: int) -> tuple[nn.Parameter, nn.Parameter]:
    values, scale = quantize(weight, dim)
    return nn.Parameter(values.contiguous(), requires_grad=False), nn.Parameter(scale, requires_grad=False)
