"""Weights packed by the compressed-tensors library itself, and the weights that it says they stand for."""

from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

from model_runner_base.testing.quantized import Pack, Packed, Scheme

try:
    from compressed_tensors.compressors.quantized_compressors.fp4_quantized import pack_fp4_to_uint8
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32
except ImportError:  # Newer releases of the library have one folder for each format.
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT8_ASYMMETRIC = INT8 | {"symmetric": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
INT4_ASYMMETRIC = INT4 | {"symmetric": False}
INT4_ORDERED = INT4_ASYMMETRIC | {"actorder": "group"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
FP8_CHANNEL = FP8 | {"strategy": "channel"}
FP8_BLOCK = FP8 | {"strategy": "block", "block_structure": [32, 16]}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
FORMATS = {"int": "int-quantized", "float": "float-quantized"}


def library_scheme(weights: dict[str, Any], rounds_activations: bool = False) -> Scheme:
    """Scheme of settings as ``config_groups`` has them."""
    is_packed = weights["num_bits"] == 4
    form = FORMATS[weights["type"]] if not is_packed else "nvfp4-pack-quantized"
    form = "pack-quantized" if is_packed and weights["type"] == "int" else form
    activations = {"num_bits": 8, "type": weights["type"], "dynamic": True} if rounds_activations else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    return Scheme(config, library_pack(weights))


def library_pack(weights: dict[str, Any]) -> Pack:
    args = QuantizationArgs(**weights)

    def pack(weight: np.ndarray, rng: np.random.Generator) -> Packed:
        values = torch.from_numpy(weight)
        index = torch.arange(weight.shape[1]) // weights.get("group_size", 1)
        if weights.get("actorder"):
            index = index[torch.from_numpy(rng.permutation(len(index)))]
        known: dict[str, Any] = {"zero_point": None} | _scales(values, weights, index)
        if weights.get("actorder"):
            known["g_idx"] = index.int()
        if args.type == "float" and args.num_bits == 4:
            # The library compiles these, which takes longer than all of the tests.
            with torch.compiler.set_stance("force_eager"):
                rounded = quantize(x=values, args=args, **known)
                tensors = {".weight_packed": pack_fp4_to_uint8(rounded)}
            tensors[".weight_global_scale"] = known["global_scale"]
        else:
            kind = torch.int8 if args.type == "int" else torch.float8_e4m3fn
            rounded = quantize(x=values, args=args, dtype=kind, **known)
            tensors = {".weight": rounded}
        plain = dequantize(x_q=rounded, args=args, dtype=torch.float32, **known)
        zero = known.get("zero_point")
        if args.type == "int" and args.num_bits == 4:
            tensors = {".weight_packed": pack_to_int32(rounded, 4), ".weight_shape": torch.tensor(weight.shape)}
            zero = zero if zero is None else pack_to_int32(zero, 4, packed_dim=0)
        is_nvfp4 = "global_scale" in known
        tensors[".weight_scale"] = known["scale"].to(torch.float8_e4m3fn) if is_nvfp4 else known["scale"]
        tensors |= {".weight_zero_point": zero} if zero is not None else {}
        tensors |= {".weight_g_idx": known["g_idx"]} if "g_idx" in known else {}
        return Packed(tensors, plain.float().numpy())

    return pack


def _scales(values: torch.Tensor, weights: dict[str, Any], index: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scales, and zero points if the scheme has them, from the ranges of rows, groups or blocks."""
    strategy, top = weights["strategy"], {"int": 2.0 ** (weights["num_bits"] - 1) - 1, "float": 448.0}[weights["type"]]
    if strategy == "tensor_group":
        factor = 448 * 6 / values.abs().max().reshape(1)
        scale = values.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * factor
        return {"scale": scale.to(torch.float8_e4m3fn).float(), "global_scale": factor}
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return {"scale": values.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3)) / top}
    if strategy == "tensor":
        return {"scale": values.abs().max().reshape(1) / top}
    own = [values[:, index == number] for number in range(int(index.max()) + 1)] if strategy == "group" else [values]
    low, high = torch.stack([each.amin(1) for each in own], 1), torch.stack([each.amax(1) for each in own], 1)
    if weights["symmetric"]:
        return {"scale": torch.maximum(-low, high) / top}
    scale = (high - low) / (2 * top + 1)
    zero = (-top - 1 - low / scale).round().clamp(-top - 1, top)
    return {"scale": scale, "zero_point": zero.to(torch.int8)}
