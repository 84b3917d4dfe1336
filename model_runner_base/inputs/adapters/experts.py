"""Adapters in experts: the matrices of all slots are some more weights of each expert (models/layers/fused_moe.py).

A tile has tokens of one expert, and each token the adapter of its own request. So the tile is multiplied by that
expert's A of all slots, a mask keeps each token's own slot, and the expert's B of all slots comes after it, as in other
layers (``punica.py``). An adapter adds to the first products before the activation, and to the last product after it.
Matrices are gathered along with the expert's weights, and so many tiles are run at a time as both have memory for.

In a checkpoint, an adapter has matrices by expert, or those of all experts in one, as the model's own weights are:

    each expert    experts.3.gate_proj, experts.3.up_proj, experts.3.down_proj
    one for all    experts.base_layer for gate and up, experts for down: A [experts * rank, in], B [out, rank * experts]

E: experts, P: parts (2 where gate and up have an A each), S: slots, r: their rank, H: hidden size, W: the first
products' width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from vllm.config.lora import LoRAConfig
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from model_runner_base.admission.adapter_checks import Widths
from model_runner_base.inputs.adapters.slots import SlotLayer, SlotWriter
from model_runner_base.models.layers.fused_moe import (
    ACTIVATIONS,
    GATHER_COST,
    MAX_DENSE_TOKENS,
    Experts,
    PlainExpertsMethod,
    tiles_at_once,
    tiles_of,
)
from model_runner_base.vllm_compat.probes.experts import ExpertsView

INTERLEAVED = "swigluoai"
"""Activation whose gate and up numbers alternate."""
LAYOUT = "third"
"""Dimension of the slots in a tensor of matrices, by ``SlotWriter``'s name for it."""


class AdaptedExperts(NamedTuple):
    """Weights of E experts, and the matrices of their adapters."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: str
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    """Weights and activation, as ``Experts`` has them."""
    gate_up_a: torch.Tensor
    """[E, P, S, r, H]"""
    gate_up_b: torch.Tensor
    """[E, P, S, r, W / P]"""
    down_a: torch.Tensor
    """[E, 1, S, r, inner]"""
    down_b: torch.Tensor
    """[E, 1, S, r, H]"""

    def take(self, ids: torch.Tensor) -> "AdaptedExperts":
        """Copies the weights and the matrices of the experts ``ids``."""
        taken: Any = (value[ids] if isinstance(value, torch.Tensor) else value for value in self)
        return AdaptedExperts(*taken)

    def run(self, inputs: torch.Tensor, is_own: torch.Tensor) -> torch.Tensor:
        """Runs each expert on its own inputs [E, M, hidden], or all on the same ones [1, M, hidden]: [E, M, hidden].

        ``is_own`` bool [E, M, S], or [1, M, S], is True at the slot of each input's adapter.
        """
        inner = torch.matmul(inputs, self.gate_up) + _product(inputs, is_own, self.gate_up_a, self.gate_up_b)
        if self.gate_up_bias is not None:
            inner = inner + self.gate_up_bias.unsqueeze(1)
        inner = ACTIVATIONS[self.activation](inner)
        out = torch.matmul(inner, self.down) + _product(inner, is_own, self.down_a, self.down_b)
        return out if self.down_bias is None else out + self.down_bias.unsqueeze(1)


def _product(inputs: torch.Tensor, is_own: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiplies inputs [E, M, in] by A and B of their own slots: [E, M, out], part after part."""
    shrunk = torch.matmul(inputs.to(a.dtype), a.flatten(1, 3).transpose(1, 2)).unflatten(-1, a.shape[1:4])
    own = torch.where(is_own[:, :, None, :, None], shrunk, 0).flatten(3)
    return torch.matmul(own.transpose(1, 2), b.flatten(2, 3)).transpose(1, 2).flatten(2).to(inputs.dtype)


class AdaptedExpertsMethod(PlainExpertsMethod):
    """Runs experts with their adapters; their weights are loaded, and loaded again, as without."""

    experts_type = AdaptedExperts

    def __init__(self, moe: Any, stacks: Sequence[torch.Tensor], punica: Any) -> None:
        """``stacks`` are the last four of ``AdaptedExperts``; ``punica`` knows each token's slot."""
        super().__init__(moe)
        self._stacks, self._punica = stacks, punica

    def experts(self, layer: Any) -> Any:
        return AdaptedExperts(*super().experts(layer), *self._stacks)

    def further_inputs(self) -> list[torch.Tensor]:
        return [self._punica.is_own_slot]


class NamedExperts(NamedTuple):
    """A layer of experts, and the names that an adapter has for its matrices."""

    layer: ExpertsView
    names: Sequence[str]
    """(gate, down, up) or (up, down) of each expert, one expert after another; or (gate and up, down) of all experts in
    one."""

    @property
    def num_names(self) -> int:
        """Number of names of one expert; 0 if all experts have theirs in one."""
        return len(self.names) // self.layer.global_num_experts if len(self.names) > 2 else 0

    def unsupported_reason(self, config: LoRAConfig, has_kernels: bool) -> str:
        """Returns the reason why these experts take no adapters, as words after "with"; empty if they do.

        ``has_kernels`` is True where kernels make the platform's LoRA products.
        """
        layer, method = self.layer, type(self.layer.quant_method)
        num_gates = 0 if layer.activation.endswith("_no_mul") else 1
        reasons = {
            "vLLM's LoRA kernels": has_kernels,
            f"experts that {method.__name__} runs": method is not PlainExpertsMethod,
            "enable_expert_parallel (leave it out)": layer.expert_map is not None,
            "fully_sharded_loras (leave it out)": config.fully_sharded_loras and layer.moe_config.tp_size > 1,
            "gate and up numbers that alternate, by expert": self.num_names > 0 and layer.activation == INTERLEAVED,
            "other matrices than gate, up and down": (
                len(self.names) not in (2, (2 + num_gates) * layer.global_num_experts)
            ),
        }
        return next((reason for reason, is_so in reasons.items() if is_so), "")


class ExpertsSlots(SlotLayer):
    """A layer of experts as vLLM's manager writes its adapters; the layer's own method runs them."""

    def __init__(self, experts: NamedExperts, config: LoRAConfig, writer: SlotWriter, punica: Any) -> None:
        self.layer = layer = experts.layer
        self.names = experts.names
        plain: Experts = layer.quant_method.experts(layer.weights)
        (self._num_experts, hidden, width), inner = plain.gate_up.shape, plain.down.shape[1]
        self._by_expert = experts.num_names
        num_parts = max(self._by_expert - 1, 1)
        is_halved = num_parts == 1 and width == 2 * inner and plain.activation != INTERLEAVED
        self._num_halves = 2 if is_halved else 1
        """Number of equal lengths that the first product's columns are cut over ranks by."""
        moe = layer.moe_config
        self._num_ranks, self._rank = moe.tp_size, moe.tp_rank
        self._top_k = moe.experts_per_token
        self._sizes = (num_parts, hidden, width // num_parts * moe.tp_size), (1, inner * moe.tp_size, hidden)
        """Parts, inputs, and outputs of each part, of the first product and of the last, whole over all ranks."""
        lengths = (num_parts, hidden), (num_parts, width // num_parts), (1, inner), (1, hidden)
        self._like = [(self._num_experts, parts, 1, config.max_lora_rank, length) for parts, length in lengths]
        """Shapes of one slot."""
        assert isinstance(config.lora_dtype, torch.dtype)
        self._writer, self._num_slots, self._dtype = writer, config.max_loras, config.lora_dtype
        self._stacks = [writer.make((*like[:2], self._num_slots, *like[3:]), self._dtype) for like in self._like]
        self._is_zero = [True] * self._num_slots
        weights = [each for each in plain if isinstance(each, torch.Tensor)]
        self._bytes_of_expert = sum(each.nbytes for each in (*weights, *self._stacks)) // self._num_experts
        """Bytes that a tile gathers."""
        layer.weights.quant_method = AdaptedExpertsMethod(moe, self._stacks, punica)

    def widths(self) -> dict[str, Widths]:
        """Widths of the matrices in a checkpoint, by their names."""
        first, last = (Widths(num_in, num_out) for _, num_in, num_out in self._sizes)
        if self._by_expert:
            return {name: last if at % self._by_expert == 1 else first for at, name in enumerate(self.names)}
        gate_up, down = self.names
        return {
            gate_up: first._replace(num_experts=self._num_experts, needs=down),
            down: last._replace(num_experts=self._num_experts, needs=gate_up),
        }

    def pack(self, name: str, found: Sequence[LoRALayerWeights | None]) -> PackedLoRALayerWeights:
        """Packs an adapter's matrices, one pair or None for each of ``names``, as A [E, P, 1, rank, in] and B
        [E, P, 1, rank, out] of the first product and of the last."""
        for weights in filter(None, found):
            weights.optimize()  # Multiplies B by the adapter's scale.
        if self._by_expert:
            parts = [found[at :: self._by_expert] for at in range(self._by_expert)]
            firsts, lasts = [parts[0], *parts[2:]], [parts[1]]
            products = zip((firsts, lasts), self._sizes, strict=True)
            pairs = [_stacked(each, *size[1:], self._dtype) for each, size in products]
        else:
            pairs = [_unfolded(weights, self._num_experts) for weights in found if weights is not None]
        lora_a, lora_b = map(list, zip(*pairs, strict=True))
        return PackedLoRALayerWeights(name, lora_a[0].shape[3], [None, None], lora_a, lora_b, scaling=[1.0, 1.0])

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        (gate_up_a, down_a), (gate_up_b, down_b) = lora_a, lora_b
        gate_up_b, down_a = self._own_part(gate_up_b, self._num_halves), self._own_part(down_a, 1)
        self._send(index, (gate_up_a, gate_up_b, down_a, down_b))
        self._is_zero[index] = False

    def reset_lora(self, index: int) -> None:
        if not self._is_zero[index]:
            self._send(index, self._zeros())
            self._is_zero[index] = True

    def warm_up(self) -> None:
        for stack, values in zip(self._stacks, self._zeros(), strict=True):
            self._writer.warm_up(stack, values, LAYOUT)

    def products_memory(self, num_tokens: int, num_logits: int) -> int:
        """Bytes of both products at a time, in the costlier way to run experts: three times ``x A`` of all slots and
        ``x A B``; the matrices that are gathered for them; the slots of all inputs."""
        of_expert = sum(each.nbytes for each in self._stacks) // self._num_experts
        gathered = min(num_tokens * self._top_k, self._num_experts // GATHER_COST)
        held = places = self._num_experts * min(num_tokens, MAX_DENSE_TOKENS)
        if num_tokens > MAX_DENSE_TOKENS:
            num_tiles, tile = tiles_of(num_tokens * self._top_k, self._num_experts)
            gathered = tiles_at_once(num_tiles, self._bytes_of_expert, is_unrolled=True)
            held, places = max(held, gathered * tile), max(places, num_tiles * tile)
        (first_a, first_b), (last_a, last_b) = self._like[:2], self._like[2:]
        numbers = sum(a[1] * (self._num_slots * a[3] + b[4]) for a, b in ((first_a, first_b), (last_a, last_b)))
        return held * 3 * numbers * torch.float32.itemsize + gathered * of_expert + places * self._num_slots

    def write_memory(self) -> int:
        """Bytes of the layer's largest stack, which a write copies, and of one slot of it."""
        largest = max(stack.nbytes for stack in self._stacks)
        return largest + largest // self._num_slots

    def slots_memory(self) -> int:
        return sum(stack.nbytes for stack in self._stacks)

    def _zeros(self) -> list[torch.Tensor]:
        """Zeros of one slot, on the host."""
        return [torch.zeros(like, dtype=self._dtype) for like in self._like]

    def _own_part(self, matrix: torch.Tensor, num_halves: int) -> torch.Tensor:
        """Columns of this rank, from each half."""
        halves = matrix.unflatten(-1, (num_halves, -1))
        length = halves.shape[-1] // self._num_ranks
        return halves.narrow(-1, self._rank * length, length).flatten(-2)

    def _send(self, index: int, matrices: Sequence[torch.Tensor]) -> None:
        """Sends matrices of any rank, padded to the largest, to a slot on the device."""
        for stack, like, matrix in zip(self._stacks, self._like, matrices, strict=True):
            values = F.pad(matrix, (0, 0, 0, like[3] - matrix.shape[3])).contiguous()
            self._writer.write(stack, index, values, LAYOUT)


def _stacked(
    parts: Sequence[Sequence[LoRALayerWeights | None]], num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of each part's experts in one tensor, with zeros for experts that an adapter leaves out."""
    found = [weights for part in parts for weights in part if weights is not None]
    rank = max((weights.lora_a.shape[0] for weights in found), default=1)
    a, b = (torch.zeros(len(parts[0]), len(parts), 1, rank, length, dtype=dtype) for length in (num_in, num_out))
    for at, part in enumerate(parts):
        for expert, weights in enumerate(part):
            if weights is not None:
                own = weights.lora_a.shape[0]
                a[expert, at, 0, :own], b[expert, at, 0, :own] = weights.lora_a, weights.lora_b.t()
    return a, b


def _unfolded(weights: LoRALayerWeights, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [experts * rank, in] and B [out, rank * experts], by experts."""
    a = weights.lora_a.unflatten(0, (num_experts, 1, 1, -1))
    b = weights.lora_b.unflatten(1, (-1, 1, 1, num_experts)).permute(4, 2, 3, 1, 0).contiguous()
    return a, b
