"""MXFP4 checkpoints as gpt-oss is released: all experts of a layer stacked, everything else plain."""

from collections.abc import Collection

import torch

from model_runner_base.models.quantized.arithmetic import scale_values, unpack_fp4
from model_runner_base.models.quantized.weight_format import VALUES, Parts, WeightFormat


class GptOssMxfp4(WeightFormat):
    """MXFP4: ``gate_up_proj_blocks`` [experts, out, blocks, 16] uint8 with 32 values a block, and
    ``gate_up_proj_scales`` [experts, out, blocks] uint8, powers of two. The weight is [experts, in, out]."""

    title = "MXFP4"
    endings = {"_blocks": (VALUES, ""), "_scales": ("scale", "")}  # noqa: RUF012
    num_dims = 3

    def needed(self, weight: str, parts: Parts) -> Collection[str]:
        return (VALUES, "scale")

    def compute(self, weight: str, parts: Parts) -> torch.Tensor:
        values, scale = unpack_fp4(parts[VALUES]), scale_values(parts["scale"])
        if values.shape[:-1] != scale.shape:
            raise ValueError(f"scales of shape {list(scale.shape)} do not fit blocks of {list(parts[VALUES].shape)}")
        return values.mul_(scale.unsqueeze(-1)).flatten(-2).T
