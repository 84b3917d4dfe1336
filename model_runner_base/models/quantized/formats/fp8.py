"""FP8 checkpoints with a scale for each tensor, row or block, as vLLM, DeepSeek, FBGEMM and Mistral write them."""

from collections.abc import Collection

import torch

from model_runner_base.models.quantized.arithmetic import scale_, scale_values
from model_runner_base.models.quantized.weight_format import VALUES, Parts, WeightFormat

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

    def part_of(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        return super().part_of(name, dtype) or ((name, VALUES) if dtype in FLOAT8 else None)

    def names_of(self, weight: str, part: str) -> list[str]:
        if part == VALUES:
            return [weight]
        usual = "_scale_inv" if self.config.get("weight_block_size") else "_scale"
        return sorted(super().names_of(weight, part), key=lambda name: not name.endswith(usual))

    def needed(self, weight: str, parts: Parts) -> Collection[str]:
        return (VALUES, "scale")

    def compute(self, weight: str, parts: Parts) -> torch.Tensor:
        values = parts[VALUES].float()
        block = tuple(self.config.get("weight_block_size") or (1, 1))
        return scale_(values, scale_values(parts["scale"]), block)
