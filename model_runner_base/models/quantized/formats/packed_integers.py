"""GPTQ and AWQ checkpoints: integers of a few bits, packed into words, in groups with a scale and a zero point each."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from model_runner_base.models.quantized.arithmetic import scale_, shift_, unpack_integers
from model_runner_base.models.quantized.weight_format import VALUES, Fields, WeightFormat


class Gptq(WeightFormat):
    """GPTQ: ``qweight`` [in / p, out] and ``qzeros`` [groups, out / p] int32 with p values a word, ``scales``
    [groups, out], and ``g_idx`` [in], the group of each input (act order).

    ``weight[o, i] = scales[g, o] * (q[i, o] - zero[g, o])``, with ``g = g_idx[i]``. A stored zero point is one less
    than ``zero``, but for ``checkpoint_format`` gptq_v2.
    """

    title = "GPTQ"
    endings = {  # noqa: RUF012
        ".qweight": (VALUES, ".weight"),
        ".qzeros": ("zeros", ".weight"),
        ".scales": ("scales", ".weight"),
        ".g_idx": ("groups", ".weight"),
    }

    def unsupported_reason(self) -> str | None:
        settings = [self.config, *(self.config.get("dynamic") or {}).values()]
        bits = [each["bits"] for each in settings if each and "bits" in each]
        unserved = [each for each in bits if each not in (2, 4, 8)]
        if unserved or not bits:
            return f"bits {unserved[0] if unserved else None}"
        form = self.config.get("checkpoint_format", "gptq")
        return None if form in ("gptq", "gptq_v2") else f"checkpoint_format {form}"

    def needed(self, weight: str, fields: Fields) -> Collection[str]:
        needed = (VALUES, "zeros", "scales")
        return (*needed, "groups") if self._setting(weight, "desc_act") else needed

    def _rule(self, weight: str) -> tuple[str, Mapping[str, Any]]:
        """The first pattern of ``dynamic`` that a layer's name begins with, and its settings; empty if none does."""
        for pattern, settings in (self.config.get("dynamic") or {}).items():
            if re.match(re.sub(r"^[+-]:", "", pattern), weight.removesuffix(".weight")):
                return pattern, settings or {}
        return "", {}

    def _setting(self, weight: str, name: str) -> Any:
        """A setting of one layer, of its rule in ``dynamic`` or of the whole config."""
        return self._rule(weight)[1].get(name, self.config.get(name))

    def _group_size(self, weight: str, num_inputs: int) -> int:
        size = self._setting(weight, "group_size")
        return num_inputs if size in (None, -1) else int(size)

    def misfit(self, weight: str, fields: Fields) -> str | None:
        rule, bits = self._rule(weight)[0], self._setting(weight, "bits")
        if rule.startswith("-:"):
            return f"dynamic has {rule}, so it should be stored as it is"
        values, zeros, scales, groups = (fields.get(field) for field in (VALUES, "zeros", "scales", "groups"))
        pairs = [("qzeros", zeros, 1, scales, 1, "scales"), ("qweight", values, 0, groups, 0, "g_idx")]
        for name, packed, dim, whole, whole_dim, other in pairs:
            if packed is None or whole is None or packed.ndim != 2 or whole.ndim <= whole_dim:
                continue
            count, words = whole.shape[whole_dim], packed.shape[dim]
            if words != (wanted := -(-count // (32 // bits))):
                found = f"{name} has {words} words for the {count} numbers of {other}"
                return f"{found}: its config says {bits} bits, which take {wanted}"
        if values is None or groups is None or not values.is_meta or groups.is_meta:
            return None
        # The weight was made without them.
        in_order = torch.arange(len(groups), device=groups.device) // self._group_size(weight, len(groups))
        return None if groups.equal(in_order.to(groups.dtype)) else "its g_idx, which came last, has an order"

    def compute(self, weight: str, fields: Fields) -> torch.Tensor:
        bits = self._setting(weight, "bits")
        values = unpack_integers(fields[VALUES].T.contiguous(), bits)
        scales = fields["scales"].float()
        zeros = unpack_integers(fields["zeros"], bits)[:, : scales.shape[1]]
        if self.config.get("checkpoint_format", "gptq") == "gptq":
            zeros = zeros + 1
        num_inputs, num_groups = values.shape[1], scales.shape[0]
        if zeros.shape != scales.shape:
            raise ValueError(f"{list(zeros.shape)} zero points do not fit {list(scales.shape)} scales")
        groups = fields.get("groups")
        if groups is None:
            size = self._group_size(weight, num_inputs)
            if num_groups != -(-num_inputs // size):
                raise ValueError(f"{num_groups} groups of {size} do not make {num_inputs} inputs")
            groups = torch.arange(num_inputs, device=values.device) // size
        elif groups.shape != (num_inputs,):
            raise ValueError(f"g_idx has shape {list(groups.shape)} for {num_inputs} inputs")
        values.sub_(zeros.index_select(0, groups.int()).T)
        return values.float().mul_(scales.index_select(0, groups.int()).T)


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

    def needed(self, weight: str, fields: Fields) -> Collection[str]:
        return (VALUES, "zeros", "scales")

    def compute(self, weight: str, fields: Fields) -> torch.Tensor:
        values, zeros, scales = _in_order(fields[VALUES]), _in_order(fields["zeros"]), fields["scales"].float()
        size = self.config.get("group_size", self.config.get("q_group_size", -1))
        block = (values.shape[0] if size in (None, -1) else size, 1)
        return scale_(shift_(values, zeros, block).float(), scales, block).T


def _in_order(packed: torch.Tensor) -> torch.Tensor:
    """Integers [rows, 8 * P] in the order of the outputs, of words [rows, P]."""
    return unpack_integers(packed, 4).unflatten(-1, (-1, 8))[..., PLACES].flatten(-2)
