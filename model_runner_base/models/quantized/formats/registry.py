"""Formats by the ``quant_method`` of a config, that of GGUF files, and vLLM's methods that read such files."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.quantized.formats.compressed_tensors import CompressedTensors
from model_runner_base.models.quantized.formats.modelopt import ModelOpt
from model_runner_base.models.quantized.formats.packed_integers import Awq, Gptq
from model_runner_base.models.quantized.formats.small_floats import Fp8, GptOssMxfp4
from model_runner_base.models.quantized.weight_format import Fields, WeightFormat


class Gguf(WeightFormat):
    """GGUF: no stored tensor is a field of a weight, each is a weight. ``config`` names the ``file``."""

    title = "GGUF"
    endings = {}  # noqa: RUF012

    def unsupported_reason(self) -> str | None:
        return None if self.config.get("file") else "no file in their config"

    def needed(self, weight: str, fields: Fields) -> Collection[str]:
        return ()

    def compute(self, weight: str, fields: Fields) -> torch.Tensor:
        raise ValueError("it has no fields")


class Known(NamedTuple):
    form: type[WeightFormat]
    methods: frozenset[str]
    """vLLM's methods that read such files; names change from release to release."""


_MODELOPT = Known(ModelOpt, frozenset({"modelopt", "modelopt_fp4", "modelopt_mixed"}))
FORMATS: dict[str, Known] = {
    "fp8": Known(Fp8, frozenset({"fp8"})),
    "fbgemm_fp8": Known(Fp8, frozenset({"fbgemm_fp8"})),
    "compressed-tensors": Known(CompressedTensors, frozenset({"compressed-tensors"})),
    "awq": Known(Awq, frozenset({"awq", "awq_marlin", "auto_awq", "cpu_awq"})),
    "gptq": Known(Gptq, frozenset({"gptq", "gptq_marlin", "auto_gptq"})),
    "mxfp4": Known(GptOssMxfp4, frozenset({"mxfp4", "gpt_oss_mxfp4"})),
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "modelopt_mixed": _MODELOPT,
    "gguf": Known(Gguf, frozenset({"gguf"})),
}
"""Formats that are dequantised."""


def method_of(config: Mapping[str, Any]) -> str:
    """The config's ``quant_method`` as vLLM spells it; ModelOpt's own files have none."""
    method = str(config.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    return method or ("modelopt" if config.get("producer", {}).get("name") == "modelopt" else "")


def format_of(config: Mapping[str, Any]) -> WeightFormat:
    """The format of a ``quantization_config``; raises UnsupportedConfigError for one that is not dequantised."""
    method = method_of(config)
    if method not in FORMATS:
        raise UnsupportedConfigError(
            f"quantization {method} has no kernels here and is not dequantised: use the checkpoint that this one was "
            f"made from, or one in a format of {', '.join(FORMATS)}"
        )
    form = FORMATS[method].form(config)
    if reason := form.unsupported_reason():
        raise UnsupportedConfigError(
            f"{form.title} checkpoints with {reason} are not dequantised: use the checkpoint that this one was made "
            "from"
        )
    return form
