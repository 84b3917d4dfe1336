"""Interface of a quantised format: which stored tensors belong to one weight, and the weight that they make."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

VALUES = "values"
"""Field that holds a weight's quantised values; the other fields say what they mean."""
UNUSED_ENDINGS = (
    ".input_scale",
    "_proj_input_scale",
    ".input_scale_inv",
    ".input_scale_ub",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".qscale_act",
    ".k_scale",
    ".kv_scale",
    ".v_scale",
    ".q_scale",
    ".prob_scale",
    ".output_scale",
    ".k_zero_point",
    ".v_zero_point",
)
"""Endings of stored scales of activations, which are not quantised here, and of KV caches. 8-bit caches take theirs
before the stream is dequantised."""

WEIGHT_ENDINGS = (".weight", "_proj")
"""Endings of the names of weights that formats quantise."""

Fields = Mapping[str, torch.Tensor]
"""Stored tensors of one weight by the name of their field."""


class WeightFormat(ABC):
    """Quantised format of a checkpoint. ``config`` is the ``quantization_config`` of its ``config.json``."""

    title: ClassVar[str]
    """The format's name in messages."""
    endings: ClassVar[Mapping[str, tuple[str, str]]]
    """Endings of stored names: the field that such a tensor is, and what the weight's name ends with instead. Longer
    endings come before those that they end with."""
    num_dims: ClassVar[int] = 2
    """Dimensions of the values of one weight. If they have another one in front, weights of experts are stacked."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def unsupported_reason(self) -> str | None:
        """Setting of the config that cannot be dequantised, in words; this default finds none."""
        return None

    def rounds_activations(self) -> bool:
        """Whether the format's own kernels round activations too; this default says no."""
        return False

    def field_of(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        """The weight that a stored tensor belongs to, and its field; None for a tensor that is stored as it is."""
        for ending, (field, plain) in self.endings.items():
            if name.endswith(ending):
                return name.removesuffix(ending) + plain, field
        return None

    @abstractmethod
    def needed(self, weight: str, fields: Fields) -> Collection[str]:
        """Fields without which a weight cannot be computed; ``fields`` are those that are known."""

    def misfit(self, weight: str, fields: Fields) -> str | None:
        """Contradiction of the config and the known fields of a weight, in words; this default finds none.

        Only names, dtypes and shapes are compared, and the numbers of fields that are no meta tensors.
        """
        return None

    @abstractmethod
    def compute(self, weight: str, fields: Fields) -> torch.Tensor:
        """One weight, or a stack of them, in float32; raises ValueError if its fields do not fit together."""

    def unread(self, name: str, dtype: torch.dtype) -> str | None:
        """Message about a weight that is no field of a quantised one, and that is not stored in a dtype of plain ones;
        None for a plain weight."""
        if dtype.itemsize > 1 or dtype == torch.bool or not name.endswith(WEIGHT_ENDINGS):
            return None
        return f"{name} is stored in {str(dtype).removeprefix('torch.')}, and {self.title} has no such weights"

    def field_names(self) -> set[str]:
        """Fields that a weight may have."""
        return {VALUES, *(field for field, _ in self.endings.values())}

    def names_of(self, weight: str, field: str) -> list[str]:
        """Names under which a weight's field may be stored, the usual one first."""
        return [
            weight.removesuffix(plain) + ending
            for ending, (known, plain) in self.endings.items()
            if known == field and weight.endswith(plain)
        ]

    def missing(self, weight: str, fields: Fields) -> list[str]:
        """Fields that are needed and not known."""
        return [field for field in self.needed(weight, fields) if field not in fields]

    def dequantise(self, weight: str, fields: Fields, dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype``. Stacked experts are computed one by one, so that float32 is held for one of them."""
        values = fields[VALUES]
        if values.ndim == self.num_dims:
            return self.compute(weight, fields).to(dtype)
        count, result = len(values), None
        for index in range(count):
            own = {
                name: field[index] if field.ndim and len(field) == count else field for name, field in fields.items()
            }
            one = self.dequantise(weight, own, dtype)
            if result is None:
                result = one.new_empty((count, *one.shape))
            result[index] = one
        if result is None:
            raise ValueError(f"it has no values: its shape is {list(values.shape)}")
        return result
