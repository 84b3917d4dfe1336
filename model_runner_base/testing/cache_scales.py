"""Scales of 8-bit KV caches in checkpoints of any family, under the names that its file has for attention blocks."""

import re

import torch

FORMS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("qkqkv_proj.k_scale", "qkqkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("k_cache.scale", "v_cache.scale"),
)
"""Names of the scales of keys and values in vLLM's mappers, after the path of an attention block."""
_PROJECTION = re.compile(
    r"(.+)\.(k_proj|qkv_proj|Wqkv|c_attn|query_key_value|kv_a_proj_with_mqa|qkv)\.(weight|linear\.weight)"
)
_OTHERS = re.compile(r".*(visual|vision|audio|tower|encoder\.|linear_attn)|.*\.conv\d?")
"""Beginnings of the names of towers, and of blocks without keys in a cache."""


def attention_paths(weights: dict[str, torch.Tensor]) -> list[str]:
    """Paths of the attention blocks of a checkpoint's decoder, in the order of its layers."""
    recurrent = {name.rpartition(".")[0] for name in weights if name.endswith(("A_log", "dt_bias"))}
    paths = {match[1] for name in weights if (match := _PROJECTION.fullmatch(name))}
    return sorted((path for path in paths - recurrent if not _OTHERS.match(path)), key=_numbers)


def _numbers(path: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", path)], path


def write_scales(weights: dict[str, torch.Tensor], scales: list[tuple[float, float]], first: int = 0) -> None:
    """Writes scales of keys and values for the attention blocks, each in another form, from the ``first`` on."""
    for index, (path, pair) in enumerate(zip(attention_paths(weights), scales, strict=True)):
        for name, scale in zip(FORMS[(first + index) % len(FORMS)], pair, strict=True):
            weights[f"{path}.{name}"] = torch.tensor(scale)


def enlarge_keys_and_values(weights: dict[str, torch.Tensor], factor: float = 1.0) -> dict[int, tuple[float, float]]:
    """Makes a tiny model of values that 8 bits do not hold, with scales; returns those by the number of the layer."""
    scales = {}
    for index, path in enumerate(attention_paths(weights)):
        weights[f"{path}.v_proj.weight"] *= 3e4
        weights[f"{path}.o_proj.weight"] /= 3e4
        scales[_numbers(path)[0][0]] = (0.3 * factor / (1 + index), 60.0 * factor * (1 + index))
    write_scales(weights, list(scales.values()))
    return scales
