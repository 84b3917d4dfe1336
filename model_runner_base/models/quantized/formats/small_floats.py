"""Checkpoints of floats with 8 or 4 bits and scales: FP8 of several libraries, and MXFP4 as gpt-oss is released.

FP8 has a scale for each tensor, row or block, as vLLM, DeepSeek, FBGEMM and Mistral write them. In MXFP4 all experts of
a layer are stacked, and everything else is plain.
"""

from collections.abc import Collection

import torch

from model_runner_base.models.quantized.arithmetic import scale_, scale_values, unpack_fp4
from model_runner_base.models.quantized.weight_format import VALUES, Fields, WeightFormat

FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


class Fp8(WeightFormat):
    """FP8: ``weight`` in float8, and a ``weight_scale`` or, in blocks, ``weight_scale_inv``; both are multiplied with
    it. Stacked experts have ``gate_up_proj`` and ``gate_up_proj_scale_inv``. Mistral's own files name the scale
    ``qscale_weight``."""

    title = "FP8"
    endings = {  # noqa: RUF012
        ".weight_scale_inv": ("scale", ".weight"),
        ".weight_scale": ("scale", ".weight"),
        ".qscale_weight": ("scale", ".weight"),
        "_proj_scale_inv": ("scale", "_proj"),
        "_proj_scale": ("scale", "_proj"),
    }

    def rounds_activations(self) -> bool:
        return True

    def field_of(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        return super().field_of(name, dtype) or ((name, VALUES) if dtype in FLOAT8 else None)

    def names_of(self, weight: str, field: str) -> list[str]:
        if field == VALUES:
            return [weight]
        usual = "_scale_inv" if self.config.get("weight_block_size") else "_scale"
        return sorted(super().names_of(weight, field), key=lambda name: not name.endswith(usual))

    def needed(self, weight: str, fields: Fields) -> Collection[str]:
        return (VALUES, "scale")

    def compute(self, weight: str, fields: Fields) -> torch.Tensor:
        values = fields[VALUES].float()
        block = tuple(self.config.get("weight_block_size") or (1, 1))
        return scale_(values, scale_values(fields["scale"]), block)


class GptOssMxfp4(WeightFormat):
    """MXFP4: ``gate_up_proj_blocks`` [experts, out, blocks, 16] uint8 with 32 values a block, and
    ``gate_up_proj_scales`` [experts, out, blocks] uint8, powers of two. The weight is [experts, in, out]."""

    title = "MXFP4"
    endings = {"_blocks": (VALUES, ""), "_scales": ("scale", "")}  # noqa: RUF012
    num_dims = 3

    def needed(self, weight: str, fields: Fields) -> Collection[str]:
        return (VALUES, "scale")

    def compute(self, weight: str, fields: Fields) -> torch.Tensor:
        values, scale = unpack_fp4(fields[VALUES]), scale_values(fields["scale"])
        if values.shape[:-1] != scale.shape:
            raise ValueError(f"scales of shape {list(scale.shape)} do not fit blocks of {list(fields[VALUES].shape)}")
        return values.mul_(scale.unsqueeze(-1)).flatten(-2).T
