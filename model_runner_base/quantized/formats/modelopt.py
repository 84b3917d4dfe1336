"""Checkpoints of NVIDIA's Model Optimizer: FP8 and NVFP4, also mixed."""

from collections.abc import Collection

import torch

from model_runner_base.quantized.arithmetic import in_blocks, scale_, scale_values, unpack_fp4
from model_runner_base.quantized.formats.fp8 import Fp8
from model_runner_base.quantized.weight_format import VALUES, Parts

GROUP = 16
"""Values of NVFP4 that share a scale."""
ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "MIXED_PRECISION",
)


class ModelOpt(Fp8):
    """ModelOpt: FP8 as ``weight`` and ``weight_scale``. NVFP4 has bytes of two values, a float8 scale for each 16 of
    them, and a scale of those, ``weight_scale_2``."""

    title = "ModelOpt"
    endings = {".weight_scale_2": ("scale_of_scales", ".weight"), **Fp8.endings}  # noqa: RUF012

    def _algorithm(self) -> str:
        """Name of the algorithm; older files have it in a dictionary of their own."""
        config = self.config.get("quantization", self.config)
        return str(config.get("quant_algo", "")).upper()

    def unsupported_reason(self) -> str | None:
        algorithm = self._algorithm()
        return None if algorithm in ALGORITHMS else f"quant_algo {algorithm or 'None'}"

    def rounds_activations(self) -> bool:
        return self._algorithm() not in ("FP8_PB_WO", "W4A16_NVFP4")

    def part_of(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        is_fp4 = dtype == torch.uint8 and name.endswith(".weight")
        return (name, VALUES) if is_fp4 else super().part_of(name, dtype)

    def needed(self, weight: str, parts: Parts) -> Collection[str]:
        is_fp4 = VALUES in parts and parts[VALUES].dtype == torch.uint8
        return (VALUES, "scale", "scale_of_scales") if is_fp4 else (VALUES, "scale")

    def compute(self, weight: str, parts: Parts) -> torch.Tensor:
        values, scale = parts[VALUES], scale_values(parts["scale"])
        if values.dtype == torch.uint8:
            values = unpack_fp4(values)
            scale, scale_of_scales = in_blocks(scale, parts["scale_of_scales"].float(), (1, 1))
            return scale_(values, scale * scale_of_scales, (1, GROUP))
        block = (1, 1)
        if scale.ndim == 4:  # Blocks of 128 by 128: [rows, 1, columns, 1].
            scale, block = scale[:, 0, :, 0], (128, 128)
        return scale_(values.float(), scale, block)
