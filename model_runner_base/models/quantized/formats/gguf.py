"""GGUF files: their tensors come dequantised from the file, under the names of a plain checkpoint."""

from collections.abc import Collection

import torch

from model_runner_base.models.quantized.weight_format import Parts, WeightFormat


class Gguf(WeightFormat):
    """GGUF: no stored tensor is a part of a weight, each is a weight. ``config`` names the ``file``."""

    title = "GGUF"
    endings = {}  # noqa: RUF012

    def unsupported_reason(self) -> str | None:
        return None if self.config.get("file") else "no file in their config"

    def needed(self, weight: str, parts: Parts) -> Collection[str]:
        return ()

    def compute(self, weight: str, parts: Parts) -> torch.Tensor:
        raise ValueError("it has no parts")
