"""Checkpoints of NVIDIA's Model Optimizer: FP8 and NVFP4, also mixed."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import torch

from model_runner_base.models.quantized.arithmetic import in_blocks, scale_, scale_values, unpack_fp4
from model_runner_base.models.quantized.formats.small_floats import Fp8
from model_runner_base.models.quantized.weight_format import VALUES, Fields

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

    def _own(self) -> Mapping[str, Any]:
        """The config; older files have it in a dictionary of its own."""
        own: Mapping[str, Any] = self.config.get("quantization", self.config)
        return own

    def _algorithm(self) -> str:
        return str(self._own().get("quant_algo", "")).upper()

    @cached_property
    def _algorithms(self) -> dict[str, str]:
        """Algorithms of the layers that have their own, in mixed precision."""
        layers = self._own().get("quantized_layers") or {}
        return {layer: str(settings.get("quant_algo", "")).upper() for layer, settings in layers.items()}

    def unsupported_reason(self) -> str | None:
        algorithms = (self._algorithm(), *self._algorithms.values())
        others = [each for each in algorithms if each not in ALGORITHMS]
        return f"quant_algo {others[0] or 'None'}" if others else None

    def rounds_activations(self) -> bool:
        return self._algorithm() not in ("FP8_PB_WO", "W4A16_NVFP4")

    def field_of(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        is_fp4 = dtype == torch.uint8 and name.endswith(".weight")
        return (name, VALUES) if is_fp4 else super().field_of(name, dtype)

    def needed(self, weight: str, fields: Fields) -> Collection[str]:
        is_fp4 = VALUES in fields and fields[VALUES].dtype == torch.uint8
        return (VALUES, "scale", "scale_of_scales") if is_fp4 else (VALUES, "scale")

    def misfit(self, weight: str, fields: Fields) -> str | None:
        algorithm, values = self._algorithms.get(weight.removesuffix(".weight")), fields.get(VALUES)
        if values is None:
            return None
        is_fp4 = values.dtype == torch.uint8
        if algorithm is not None and is_fp4 is not algorithm.endswith("NVFP4"):
            dtype = str(values.dtype).removeprefix("torch.")
            return f"quantized_layers says {algorithm}, and its values are stored in {dtype}"
        return None if is_fp4 or "scale_of_scales" not in fields else "weight_scale_2 belongs to NVFP4, and it has FP8"

    def compute(self, weight: str, fields: Fields) -> torch.Tensor:
        values, scale = fields[VALUES], scale_values(fields["scale"])
        if values.dtype == torch.uint8:
            values = unpack_fp4(values)
            scale, scale_of_scales = in_blocks(scale, fields["scale_of_scales"].float(), (1, 1))
            return scale_(values, scale * scale_of_scales, (1, GROUP))
        block = (1, 1)
        if scale.ndim == 4:  # Blocks of 128 by 128: [rows, 1, columns, 1].
            scale, block = scale[:, 0, :, 0], (128, 128)
        return scale_(values.float(), scale, block)
