"""Checks of adapters before they are loaded: whether an adapter fits its model, and whether its name is free."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.model_executor.layers.linear import QKVParallelLinear

UNREAD = (
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "use_qalora",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)
"""Settings of ``adapter_config.json`` that change what an adapter computes, and that vLLM's loader does not read."""


class Widths(NamedTuple):
    """Sizes of a layer's matrices."""

    num_in: int
    num_out: int
    num_experts: int = 1
    """Number of experts that have theirs in one: A [experts * rank, in], B [out, rank * experts]."""
    needs: str = ""
    """Layer without whose matrices this one's have no meaning; empty if there is none."""


def widths_of(layers: Mapping[str, BaseLayerWithLoRA], packed: Mapping[str, list[str]]) -> dict[str, Widths]:
    """Widths of layers by the names that an adapter's checkpoint has for them, whole over all ranks.

    A packed layer is listed under the names of its sublayers. Example: ``qkv_proj`` of 4 heads and 2 KV heads of size
    8, with inputs of 32 numbers, gives q_proj (32, 32), k_proj (32, 16), v_proj (32, 16).
    """
    found: dict[str, Widths] = {}
    for name, layer in layers.items():
        base: Any = layer.base_layer  # type: ignore[attr-defined]
        if isinstance(layer, VocabParallelEmbeddingWithLoRA):
            found[name] = Widths(base.org_vocab_size, base.embedding_dim)
        elif isinstance(layer, LogitsProcessorWithLoRA):
            found[name] = Widths(layer.hidden_size, layer.vocab_size)
        elif name in packed:
            outputs, sublayers = _outputs_of(base), packed[name]
            assert len(outputs) >= len(sublayers), name
            # The first sublayer may be several outputs: queries, keys and values of a gated delta net are one matrix.
            first = len(outputs) - len(sublayers) + 1
            outputs = [sum(outputs[:first]), *outputs[first:]]
            found.update({each: Widths(base.input_size, out) for each, out in zip(sublayers, outputs, strict=True)})
        else:
            found[name] = Widths(base.input_size, sum(_outputs_of(base)))
    return found


def _outputs_of(base: Any) -> list[int]:
    """Output widths of a linear layer's parts."""
    if isinstance(base, QKVParallelLinear):
        key, value = base.total_num_kv_heads * base.head_size, base.total_num_kv_heads * base.v_head_size
        return [base.total_num_heads * base.head_size, key, value]
    return list(getattr(base, "output_sizes", None) or [base.output_size])


def check_fit(
    adapter: LoRAModel, name: str, widths: Mapping[str, Widths], max_rank: int, without: Mapping[str, str]
) -> None:
    """Raises ValueError for an adapter without matrices, or for the first matrix that does not fit the model.

    ``without`` has the layers of experts that take no adapters, and why, as words after "with".
    """
    if not adapter.loras:
        raise ValueError(f"LoRA adapter {name!r} has no matrices")
    for module, weights in adapter.loras.items():
        if module not in widths:
            for layer, reason in without.items():
                if f"{module}.".startswith(f"{layer}."):
                    raise ValueError(
                        f"LoRA adapter {name!r} is for {module}: adapters in experts are not supported with {reason}"
                    )
            raise ValueError(f"LoRA adapter {name!r} is for {module}, which this model has no adapters in")
        if weights.lora_a is None or weights.lora_b is None:
            raise ValueError(f"LoRA adapter {name!r} has only one of the two matrices of {module}")
        num_in, num_out, num_experts, needs = widths[module]
        if needs and needs not in adapter.loras:
            raise ValueError(f"LoRA adapter {name!r} is for {module} alone: train it for {needs}, too")
        rank = weights.lora_a.shape[0] // num_experts
        whole = rank * num_experts
        for matrix, shape in ((weights.lora_a, (whole, num_in)), (weights.lora_b, (num_out, whole))):
            if tuple(matrix.shape) != shape:
                raise ValueError(
                    f"LoRA adapter {name!r} does not fit: {module} has a matrix of shape {[*matrix.shape]} where the "
                    f"model takes {[*shape]}"
                )
        if rank > max_rank:
            raise ValueError(f"LoRA rank {rank} of {module} is greater than max_lora_rank {max_rank}.")


def check_config(path: str, name: str, takes_parameters: bool) -> None:
    """Raises ValueError for a setting of PEFT's that vLLM ignores although it changes the adapter's results.

    ``takes_parameters`` is True for models whose experts have their matrices in one: PEFT names the tensors of such
    experts in ``target_parameters``.
    """
    config = json.loads((Path(path) / "adapter_config.json").read_text())
    if (kind := config.get("peft_type") or "LORA") != "LORA":
        raise ValueError(f"adapter {name!r} is of type {kind}: only LORA is supported")
    for setting in UNREAD:
        if config.get(setting) and not (setting == "target_parameters" and takes_parameters):
            raise ValueError(f"LoRA adapter {name!r} has {setting}, which is not supported: train it without")


@dataclass(frozen=True)
class Contents:
    """State of an adapter's files when they were read."""

    path: str
    files: tuple[tuple[str, int, int], ...]
    """Name, length in bytes, and time of the last change in ns."""

    @classmethod
    def of(cls, request: LoRARequest) -> "Contents":
        path = Path(get_adapter_absolute_path(request.lora_path))
        stats = [(file.name, file.stat()) for file in sorted(path.glob("adapter_*"))]
        return cls(str(path), tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


class Names:
    """Adapters that each name and id has been used for in this engine.

    vLLM finds cached prefixes by an adapter's name alone (``vllm/v1/core/kv_cache_utils.py``). So while prefixes are
    cached, a name can only be used for the files that it was first used for.
    """

    def __init__(self, caches_prefixes: bool) -> None:
        self._caches_prefixes = caches_prefixes
        self._by_id: dict[int, tuple[str, str]] = {}
        self._contents: dict[str, Contents] = {}

    def check(self, request: LoRARequest, loaded: Iterable[int]) -> None:
        """Raises ValueError for an id or a name that is already used for another adapter."""
        number, name = request.lora_int_id, request.lora_name
        if number in loaded and not request.load_inplace and self._by_id[number] != (name, request.lora_path):
            other, path = self._by_id[number]
            raise ValueError(f"LoRA id {number} is taken by adapter {other!r} of {path}: give {name!r} another")
        if self._caches_prefixes and name in self._contents and self._contents[name] != Contents.of(request):
            raise ValueError(
                f"LoRA adapter {name!r} stood for other files before ({self._contents[name].path}), and prefixes that "
                "were cached then would serve these: give the adapter a new name, or turn prefix caching off "
                "(enable_prefix_caching=False)"
            )

    def note(self, request: LoRARequest) -> None:
        """Notes the id, the name and the files of an adapter that was loaded."""
        self._by_id[request.lora_int_id] = request.lora_name, request.lora_path
        self._contents.setdefault(request.lora_name, Contents.of(request))
