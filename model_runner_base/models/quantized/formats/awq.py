"""AWQ checkpoints: integers of 4 bits, packed along the outputs in an order of their own."""

from collections.abc import Collection

import torch

from model_runner_base.models.quantized.arithmetic import scale_, shift_, unpack_integers
from model_runner_base.models.quantized.weight_format import VALUES, Parts, WeightFormat

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of eight consecutive outputs, lowest bits first."""


class Awq(WeightFormat):
    """AWQ: ``qweight`` [in, out / 8] and ``qzeros`` [groups, out / 8] int32, ``scales`` [groups, out].

    ``weight[o, i] = scales[g, o] * (q[i, o] - zero[g, o])``, with ``g`` the group of input ``i``.
    """

    title = "AWQ"
    endings = {  # noqa: RUF012
        ".qweight": (VALUES, ".weight"),
        ".qzeros": ("zeros", ".weight"),
        ".scales": ("scales", ".weight"),
    }

    def unsupported_reason(self) -> str | None:
        bits = self.config.get("bits", self.config.get("w_bit"))
        if bits != 4:
            return f"bits {bits}"
        version = str(self.config.get("version", "gemm")).lower()
        if version != "gemm":
            return f"version {version}"
        return None if self.config.get("zero_point", True) else "zero_point False"

    def needed(self, weight: str, parts: Parts) -> Collection[str]:
        return (VALUES, "zeros", "scales")

    def compute(self, weight: str, parts: Parts) -> torch.Tensor:
        values, zeros, scales = _in_order(parts[VALUES]), _in_order(parts["zeros"]), parts["scales"].float()
        size = self.config.get("group_size", self.config.get("q_group_size", -1))
        block = (values.shape[0] if size in (None, -1) else size, 1)
        return scale_(shift_(values, zeros, block).float(), scales, block).T


def _in_order(packed: torch.Tensor) -> torch.Tensor:
    """Integers [rows, 8 * P] in the order of the outputs, of words [rows, P]."""
    return unpack_integers(packed, 4).unflatten(-1, (-1, 8))[..., PLACES].flatten(-2)
