"""Tiny models with random weights, one for each architecture, and their greedy decoding by HF transformers.

In a dtype that rounds, transformers also computes in that dtype, to measure what rounding moves.
"""

import json
import re
from collections import ChainMap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from vllm.compilation import decorators
from vllm.config import CompilationMode

from model_runner_base.testing.architectures import (
    CONFIGS,
    HEADS,
    IGNORED_BY_VLLM,
    LATENT,
    LATENT_LATER,
    LATER,
    REFUSED,
    SCALED,
    SPARSE,
    UNEQUAL_HEADS,
    VLLM_NAMES,
    VOCAB_SIZE,
    hf,
)
from model_runner_base.testing.indexer_reference import add_indexers, lacks_indexers
from model_runner_base.testing.no_reference import watch
from model_runner_base.testing.precision import FACTOR, PRECISION, NotLooked
from model_runner_base.testing.recurrent_architectures import RECURRENT
from model_runner_base.testing.swept_architectures import SWEPT

WRITTEN_OTHERWISE = {
    "kimi-linear": (r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),
    "longcat-flash": (r".*\.experts\.(8|9|10|11)\..*", ""),  # Experts that return their input.
}
"""Names of tensors that transformers writes otherwise than a published checkpoint has them: pattern and replacement. A
tensor without a name is left out."""
OF_TRANSFORMERS = "of_transformers"
"""Directory, in one of a checkpoint that is written otherwise, of the one that transformers reads."""
_TEXTS = (CONFIGS, HEADS, LATER, LATENT, LATENT_LATER, UNEQUAL_HEADS, SPARSE, SWEPT, RECURRENT, REFUSED)
MEASURED = 200
"""Length of the random texts by which it is measured how much rounding moves."""


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint on disk and its reference."""

    path: Path

    def greedy(self, prompt: tuple[int, ...], count: int, is_certain: bool = True) -> list[int]:
        """The reference's next ``count`` tokens, end-of-sequence ignored.

        In a dtype that rounds, it raises NotLooked if rounding may change one of them, unless they need not be
        ``is_certain``.
        """
        tokens = _greedy(self.path, prompt, count)
        if is_certain and not PRECISION.is_exact:
            narrow = np.flatnonzero(~self.are_certain([*prompt, *tokens])[len(prompt) - 1 : -1])
            if len(narrow):
                raise NotLooked(
                    f"a text of {count} tokens is compared as a whole, and in {PRECISION.name} rounding may change its "
                    f"token {narrow[0]}"
                )
        return tokens

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The reference's logits [len(tokens), V] float32: row i predicts token i + 1."""
        return _logits(self.path, tuple(tokens))

    def tolerances(self, tokens: Sequence[int], exact: float) -> np.ndarray:
        """Largest right difference [len(tokens)] of two logits of a row, or of a log probability: ``exact`` in float32,
        else what rounding explains."""
        if PRECISION.is_exact:
            return np.full(len(tokens), exact)
        # A place may move little by chance.
        return FACTOR * np.maximum(_moved(self.path, tuple(tokens)), _usually_moved(self.path))

    def are_certain(self, tokens: Sequence[int]) -> np.ndarray:
        """Whether the logits after each of the tokens prefer one token by more than rounding moves, [len(tokens)]."""
        ordered = np.partition(self.logits(tokens), -2, axis=-1)
        certain: np.ndarray = ordered[:, -1] - ordered[:, -2] > self.tolerances(tokens, 0.0)
        return certain

    def right_tokens(self, prompt: tuple[int, ...], count: int, got: Sequence[int]) -> list[int]:
        """Tokens of which those in ``got`` are right: the reference's, and in a dtype that rounds all that are as
        likely but for rounding. After a wrong one nothing is compared, so there only the right one follows."""
        if PRECISION.is_exact:
            return self.greedy(prompt, count)
        got = list(got)[:count]
        fed, start = [*prompt, *got], len(prompt) - 1
        rows, slacks = self.logits(fed)[start:], self.tolerances(fed, 0.0)[start:]
        certain = self.are_certain(fed)[start:]
        for index, token in enumerate(got):
            PRECISION.note(bool(certain[index]), 1)
            if not rows[index][token] >= rows[index].max() - slacks[index]:
                return [*got[:index], int(rows[index].argmax())]
        return [*got, int(rows[-1].argmax())][:count]


@cache
def reference_model(path: Path) -> Any:
    """The checkpoint in HF transformers, float32; raises NoReferenceError where it differs from published code."""
    return load_reference(path, torch.float32)


def load_reference(path: Path, dtype: torch.dtype, attention: str | None = None) -> Any:
    """The checkpoint in HF transformers, as ``reference_model`` but in any dtype, and with an attention of choice."""
    path = own if (own := path / OF_TRANSFORMERS).exists() else path
    config = AutoConfig.from_pretrained(path)
    # The default, "sdpa", leaves soft caps out; "eager" counts ALiBi twice in Falcon.
    attention = attention or ("eager" if getattr(config, "attn_logit_softcapping", None) else None)
    writes_text_alone = type(config) in AutoModelForCausalLM._model_mapping
    model_class: Any = AutoModelForCausalLM if writes_text_alone else AutoModelForImageTextToText
    own_class: Any = getattr(hf, (config.architectures or [""])[0], None)
    # vLLM puts its own config in place of transformers', or, for DeepSeek V3.2, that of a class without indexers.
    lacks = getattr(config, "index_topk", None) is not None and getattr(own_class, "config_class", None)
    if type(config).__module__.startswith("vllm.") or (lacks and lacks is not type(config)):
        model_class = own_class
        config = model_class.config_class.from_pretrained(path)
    with _no_engine():
        model = model_class.from_pretrained(path, config=config, dtype=dtype, attn_implementation=attention).eval()
    if lacks_indexers(model):
        model.set_attn_implementation("eager")
        add_indexers(model, path)
        model.keeps_no_keys = True
    watch(model, path)
    for module in model.modules():
        # vLLM's Transformers backend has a class of transformers ask for this, in objects that exist already, too.
        module.do_not_compile = True
    return model


def _no_engine() -> AbstractContextManager[Any]:
    """Context in which transformers makes a model as itself.

    vLLM's Transformers backend changes a class of transformers for good: its later objects ask for the engine's config.
    They get one that compiles nothing.
    """
    config = mock.MagicMock()
    config.compilation_config.mode = CompilationMode.NONE
    return mock.patch.object(decorators, "get_current_vllm_config", lambda: config)


@lru_cache(maxsize=256)  # Each may be a megabyte.
@torch.no_grad()
def _logits(path: Path, tokens: tuple[int, ...]) -> np.ndarray:
    return reference_model(path)(torch.tensor([tokens])).logits[0].float().numpy()


@cache
def _rounding_model(path: Path) -> Any:
    return load_reference(path, PRECISION.dtype)


@lru_cache(maxsize=256)
@torch.no_grad()
def _moved(path: Path, tokens: tuple[int, ...]) -> np.ndarray:
    """Root mean square [len(tokens)] of the differences of a logits row in the kit's dtype from that in float32."""
    try:
        rounded = _rounding_model(path)(torch.tensor([tokens])).logits[0].float().numpy()
    except (RuntimeError, TypeError) as error:
        raise NotLooked(f"transformers does not compute {path.name} in {PRECISION.name}: {error}") from error
    moved: np.ndarray = np.sqrt(np.square(rounded - _logits(path, tokens)).mean(axis=-1))
    return moved


@cache
def _usually_moved(path: Path) -> float:
    """Median of ``_moved`` over random texts."""
    rng = np.random.default_rng(0)
    texts = (tuple(rng.integers(3, VOCAB_SIZE, MEASURED).tolist()) for _ in range(2))
    return float(np.median([_moved(path, text) for text in texts]))


@cache
@torch.no_grad()
def _greedy(path: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference_model(path).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        use_cache=not _is_recurrent(path) and not getattr(reference_model(path), "keeps_no_keys", False),
    )
    return out[0, len(prompt) :].tolist()


@cache
def _is_recurrent(path: Path) -> bool:
    """Whether a checkpoint has recurrent layers, whose states in transformers are wrong after very short prompts."""
    kinds = {make().model_type for make in RECURRENT.values()}
    return reference_model(path).config.model_type in kinds


def make_checkpoint(name: str, directory: Path) -> TinyModel:
    """Writes a tiny checkpoint whose greedy outputs vary: large weights keep it from repeating one token."""
    path = directory / name
    if not path.exists():
        torch.manual_seed(sum(map(ord, name)))
        model = AutoModelForCausalLM.from_config(ChainMap(*reversed(_TEXTS))[name]())  # The last one wins.
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor_name == IGNORED_BY_VLLM.get(name):
                torch.nn.init.zeros_(tensor)
            elif tensor_name.endswith("correction_bias"):
                torch.nn.init.normal_(tensor, std=0.1)
            elif isinstance(tensor, torch.nn.Parameter):
                vary(tensor_name, tensor)
        for part, factor in SCALED.get(name, {}).items():
            for tensor_name, parameter in model.named_parameters():
                if part in tensor_name:
                    parameter.data *= factor
        if model.config.tie_word_embeddings:
            # A residual that is mostly the last token's embedding would make that token its own successor.
            torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.05)
        for parameter in model.parameters():
            parameter.data = PRECISION.rounded(parameter.data)
        # Saves under the current tensor names: vLLM reads those, not the ones of a family's older checkpoints.
        model._checkpoint_conversion_mapping = {}
        model.save_pretrained(path)
        if name in WRITTEN_OTHERWISE:
            model.save_pretrained(path / OF_TRANSFORMERS)
            tensors = load_file(path / "model.safetensors")
            renamed = {re.sub(*WRITTEN_OTHERWISE[name], key): tensor for key, tensor in tensors.items()}
            renamed.pop("", None)
            save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
        if name in VLLM_NAMES:
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"architectures": [VLLM_NAMES[name]]}))
    return TinyModel(path)


@torch.no_grad()
def vary(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, std=0.25)
    elif name.endswith("bias"):
        torch.nn.init.normal_(parameter, std=0.1)
    else:
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    parameter.copy_(PRECISION.rounded(parameter))
