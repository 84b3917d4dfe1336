"""Configuration of a quantised checkpoint: the quantisation is taken out, so that vLLM loads a plain model.

The stream of weights then dequantises the checkpoint.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.config import LoadConfig, ModelConfig
from vllm.logger import init_logger

from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.models.quantized.formats.registry import FORMATS, Gguf, format_of, method_of
from model_runner_base.models.quantized.gguf.checkpoint import HubAccess, local_file
from model_runner_base.models.quantized.gguf.file import is_gguf
from model_runner_base.models.quantized.gguf.weights import GgufWeights
from model_runner_base.models.quantized.stored import StoredTensors
from model_runner_base.models.quantized.stream import first_fault
from model_runner_base.models.quantized.weight_format import WeightFormat
from model_runner_base.vllm_compat.probes.models import is_deepseek_v4
from model_runner_base.vllm_compat.probes.quantization import is_registered_by_user

logger = init_logger(f"vllm.{__name__}")

ATTRIBUTE = "dequantised_from"
"""Attribute of ``hf_config``, which reaches all processes: the ``quantization_config`` that was set aside."""
_OWN_NAMES = ("quantization_config", "compression_config")


def set_aside(model_config: ModelConfig, native: Collection[str]) -> None:
    """Sets the quantisation of a checkpoint aside, unless vLLM has kernels for it.

    ``native`` are vLLM's methods with kernels on the device; a user's own methods bring theirs. Raises
    UnsupportedConfigError for a format that cannot be dequantised, and for a method that would quantise plain weights.
    """
    arch_config, hf_config = model_config.model_arch_config, model_config.hf_config
    config, asked = arch_config.quantization_config, model_config.quantization
    if (config is asked is None) or is_registered_by_user(config, asked, hf_config):
        return
    if config is None:
        if asked not in native:
            raise UnsupportedConfigError(
                f"quantization {asked} has no kernels here: leave it out, and use a plain checkpoint, or one whose "
                f"config.json has a quantization_config of {', '.join(FORMATS)}"
            )
        return
    method = method_of(config)
    if not method and asked is None:
        return  # vLLM ignores an empty quantization_config, too.
    methods = FORMATS[method].methods if method in FORMATS else frozenset({method})
    if not (methods | {method}).isdisjoint(native):
        return
    format_of(config)  # Raises for one that is not dequantised.
    if asked not in (None, method, *methods):
        raise UnsupportedConfigError(
            f"quantization={asked} does not read this checkpoint, which is of method {method}: leave it out"
        )
    model_config.quantization = arch_config.quantization_config = None
    for each in {id(hf): hf for hf in (hf_config, getattr(hf_config, "text_config", None))}.values():
        for name in _OWN_NAMES:
            if name in getattr(each, "__dict__", ()):
                delattr(each, name)
    setattr(hf_config, ATTRIBUTE, dict(config))


def format_of_model(model_config: ModelConfig) -> WeightFormat | None:
    """The format that a model's checkpoint is dequantised from; None if it is loaded as it is."""
    config = getattr(model_config.hf_config, ATTRIBUTE, None)
    return None if config is None else format_of(config)


def check_checkpoint(model_config: ModelConfig, load_config: LoadConfig) -> None:
    """Raises an error for a loader that has no stream of weights, and for a local checkpoint whose headers show that
    it is incomplete, or stored otherwise than its config says. Says in the log what is done with a checkpoint that is
    dequantised."""
    form = format_of_model(model_config)
    if form is not None and is_deepseek_v4(model_config.architecture):
        raise UnsupportedConfigError(
            "quantised checkpoints of DeepSeek V4 are not dequantised yet: use one whose weights are in bfloat16"
        )
    if form is None or load_config.load_format == "dummy":
        return
    from vllm.model_executor.model_loader import get_model_loader

    if not hasattr(get_model_loader(load_config), "get_all_weights"):
        raise UnsupportedConfigError(
            f"load_format={load_config.load_format} cannot load a checkpoint that is dequantised, {form.title}: leave "
            "it out, or use the checkpoint that this one was made from"
        )
    gguf_weights(model_config)  # Raises for a file that does not fit.
    if (stored := stored_tensors(model_config)) and (fault := first_fault(form, stored)):
        raise CheckpointError(f"cannot load checkpoint {model_config.model}: {fault}")
    message = "%s weights of %s are dequantised to %s while they are loaded%s."
    note = "; activations are not quantised, though the format's own kernels do that"
    dtype = str(model_config.dtype).removeprefix("torch.")
    logger.info_once(message, form.title, model_config.model, dtype, note if form.rounds_activations() else "")


def stored_tensors(model_config: ModelConfig) -> StoredTensors | None:
    """The stored tensors of a local checkpoint that is dequantised; None for any other, and for a GGUF file."""
    directory = Path(model_config.model)
    form = format_of_model(model_config)
    if form is None or isinstance(form, Gguf) or not directory.is_dir():
        return None
    return StoredTensors(directory)


def gguf_weights(model_config: ModelConfig) -> GgufWeights | None:
    """The weights of a GGUF file; None for any other checkpoint."""
    form = format_of_model(model_config)
    if not isinstance(form, Gguf):
        return None
    return GgufWeights(Path(form.config["file"]), model_config.hf_config)


@contextmanager
def reading(model_config: ModelConfig, path: str) -> Iterator[None]:
    """Makes the checkpoint at ``path`` the one that a config names, with the format that it has; an error inside takes
    that back.

    The format stays that of the last checkpoint if ``path`` is no local directory, or if vLLM has kernels for the
    model's.
    """
    hf_config, old_path = model_config.hf_config, model_config.model
    old = getattr(hf_config, ATTRIBUTE, None)
    if path != old_path and model_config.quantization is None:
        if is_gguf(path):
            file = local_file(path, HubAccess(hf_token=model_config.hf_token))
            _follow(hf_config, {"quant_method": "gguf", "file": str(file)})
        elif (Path(path) / "config.json").is_file():
            _follow(hf_config, _config_of(Path(path)))
    model_config.model = path
    try:
        yield
    except Exception:
        model_config.model = old_path
        _follow(hf_config, old)
        raise


def _follow(hf_config: Any, config: Mapping[str, Any] | None) -> None:
    """Sets or removes the config that weights are dequantised by; raises UnsupportedConfigError for one that cannot
    be."""
    if config is not None:
        format_of(config)
        setattr(hf_config, ATTRIBUTE, dict(config))
    elif hasattr(hf_config, ATTRIBUTE):
        delattr(hf_config, ATTRIBUTE)


def _config_of(directory: Path) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a local checkpoint; ModelOpt's older ones have it in a file of its own."""
    config = json.loads((directory / "config.json").read_text())
    for each in (config, config.get("text_config") or {}):
        for name in _OWN_NAMES:
            if each.get(name) is not None:
                return dict(each[name])
    older = directory / "hf_quant_config.json"
    return dict(json.loads(older.read_text())) if older.is_file() else None
