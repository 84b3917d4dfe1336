"""8-bit KV caches: HF transformers with keys and values that are rounded in NumPy, as a reference.

The reference rounds every layer's keys and values, and computes in float32. The engine adds in another order, so it may
round a number up that the reference rounds down. So most log probabilities are equal to float32's precision, and a few
differ by what such a number changes.
"""

import inspect
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from model_runner_base.testing.engine import generate
from model_runner_base.testing.models import TinyModel, reference_model
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.rules import log_softmax

Prompts = list[tuple[int, ...]]
Scales = dict[int, tuple[float, float]]
"""Scales of keys and of values, by layer; 1 for other layers."""
SCALES: Scales = {0: (0.037, 0.011), 1: (0.3, 60.0)}
"""Scales that ``enlarge_values`` writes; the last is too small for some of the values."""
TEXT_ALONE = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 0, "video": 0}}
"""Options of an engine with a model of images that gets none."""
TOLERANCE = 2e-3
"""Largest error of a token's log probabilities if engine and reference round all numbers alike."""
LEAST_SHARE = 0.95
"""Least share of tokens whose errors are below ``TOLERANCE``."""
FORMATS = {"fp8": (3, -6, 448.0), "fp8_e4m3": (3, -6, 448.0), "fp8_e5m2": (2, -14, 57344.0)}
"""Bits of mantissa, smallest exponent of a normal number, largest number; of the OCP specification of 8-bit floats."""


def rounded(x: np.ndarray, name: str, scale: float = 1.0) -> np.ndarray:
    """Nearest numbers of a format, ties to even."""
    mantissa, smallest, largest = FORMATS[name]
    x = np.clip(x.astype(np.float64) / scale, -largest, largest)
    exponent = np.maximum(np.frexp(x)[1] - 1, smallest)
    step = np.exp2(exponent - mantissa)
    return (np.rint(x / step) * step * scale).astype(np.float32)


@contextmanager
def rounded_reference(model: TinyModel, name: str, scales: Scales) -> Iterator[Any]:
    """The checkpoint in HF transformers, whose layers round keys and values, or latents and rotary keys."""
    reference = reference_model(model.path)
    current = 0

    def near(x: torch.Tensor, which: int) -> torch.Tensor:
        return torch.tensor(rounded(x.numpy(), name, scales.get(current, (1.0, 1.0))[which]))

    def enter(index: int) -> Callable[..., None]:
        def note(*_: Any) -> None:
            nonlocal current
            current = index

        return note

    patch, hooks = pytest.MonkeyPatch(), []
    layers = [module for module in reference.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    attentions = [layer for layer in layers if hasattr(layer, "v_proj") or hasattr(layer, "kv_a_layernorm")]
    for attention in attentions:
        hooks.append(attention.register_forward_pre_hook(enter(attention.layer_idx)))
        if hasattr(attention, "kv_a_layernorm"):
            hooks.append(attention.kv_a_layernorm.register_forward_hook(lambda _, __, out: near(out, 0)))
        else:
            hooks.append(attention.v_proj.register_forward_hook(lambda _, __, out: near(out, 1)))
        if _rotation(attention) is None:
            hooks.append(attention.k_proj.register_forward_hook(lambda _, __, out: near(out, 0)))
    for module, function in {rotation for each in attentions if (rotation := _rotation(each))}:
        plain = getattr(module, function)

        def rotate(*args: Any, plain: Any = plain, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            query, key = plain(*args, **kwargs)
            return query, near(key, 0)

        patch.setattr(module, function, rotate)
    try:
        yield reference
    finally:
        patch.undo()
        for hook in hooks:
            hook.remove()


def _rotation(attention: Any) -> tuple[ModuleType, str] | None:
    """Module and name of the function by which an attention layer rotates keys; None if it does not."""
    names = {"apply_rotary_pos_emb", "apply_rotary_emb"}.intersection(
        inspect.unwrap(type(attention).forward).__code__.co_names
    )
    return (sys.modules[type(attention).__module__], names.pop()) if names else None


@torch.no_grad()
def check_rounded(llm: LLM, model: TinyModel, prompts: Prompts, name: str, scales: Scales | None = None) -> None:
    """Compares the log probabilities of all tokens after the prompts, which run in one batch."""
    PRECISION.require_exact("numbers that an 8-bit cache rounds")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=-1)
    errors = []
    with rounded_reference(model, name, scales or {}) as reference:
        for prompt, output in zip(prompts, generate(llm, prompts, params), strict=True):
            (completion,) = output.outputs
            ids = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
            want = log_softmax(reference(ids, use_cache=False).logits[0, len(prompt) - 1 :].numpy())
            places: Any = completion.logprobs
            for entries, row in zip(places, want, strict=True):
                errors.append(max(abs(entry.logprob - row[token]) for token, entry in entries.items()))
    assert np.isfinite(errors).all(), f"{name}: log probabilities are not finite"
    share = np.mean(np.array(errors) < TOLERANCE)
    assert share >= LEAST_SHARE, f"{name}: {share:.0%} of the tokens have the reference's log probabilities"


def changed(model: TinyModel, path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> TinyModel:
    """A copy of a checkpoint, whose tensors ``change`` alters in place."""
    if not path.exists():
        shutil.copytree(model.path, path)
        weights = load_file(model.path / "model.safetensors")
        change(weights)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(path)


def enlarge_values(weights: dict[str, torch.Tensor], factor: float = 1.0) -> None:
    """Makes a tiny Llama whose values no format of eight bits holds, with scales in the forms of several tools.

    ``SCALES`` are the scales, times ``factor``.
    """
    weights["model.layers.1.self_attn.v_proj.weight"] *= 3e4
    weights["model.layers.1.self_attn.o_proj.weight"] /= 3e4
    weights["model.layers.0.self_attn.k_scale"] = torch.tensor(SCALES[0][0] * factor)
    weights["model.layers.0.self_attn.attn.v_scale"] = torch.tensor([SCALES[0][1] * factor])
    weights["model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor(SCALES[1][0] * factor)
    weights["model.layers.1.self_attn.v_proj.v_scale"] = torch.tensor(SCALES[1][1] * factor)
