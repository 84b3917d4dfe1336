"""Numbers of a cache: how they lie in memory, and what attention reads of them."""

from dataclasses import dataclass

import torch

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Formats of eight bits, by vLLM's names of ``kv_cache_dtype``."""


class Numbers:
    """Numbers in the model's dtype, stored as they are."""

    def store(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Numbers as a cache tensor of ``dtype`` has them, of the same shape."""
        return numbers

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """Numbers in the model's dtype, from what ``store`` made."""
        return stored


AS_THEY_ARE = Numbers()


@dataclass(frozen=True)
class Float8(Numbers):
    """Numbers of eight bits, in a cache of that dtype or of bytes (``DeviceOps.has_float8_caches``).

    A number is rounded to the nearest one of the format. One beyond its largest finite number becomes that: a plain
    cast would make it NaN, or infinite.
    """

    kind: torch.dtype
    """The format: ``float8_e4m3fn``, of 3 bits of mantissa, up to 448; ``float8_e5m2``, of 2 bits, up to 57344."""
    dtype: torch.dtype
    """The model's dtype."""

    def store(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        limit = torch.finfo(self.kind).max
        stored = numbers.float().clamp(-limit, limit).to(self.kind)
        return stored if dtype == self.kind else stored.view(dtype)

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        return (stored if stored.dtype == self.kind else stored.view(self.kind)).to(self.dtype)


def numbers_of(kv_cache_dtype: str, dtype: torch.dtype) -> Numbers:
    """Numbers of vLLM's ``kv_cache_dtype``, for a model of ``dtype``; raises NotImplementedError for others."""
    if kv_cache_dtype == "auto":
        return AS_THEY_ARE
    if kv_cache_dtype in FLOAT8:
        return Float8(FLOAT8[kv_cache_dtype], dtype)
    raise NotImplementedError(
        f"kv_cache_dtype={kv_cache_dtype} is not supported in plain torch: use auto, {', '.join(FLOAT8)}"
    )
