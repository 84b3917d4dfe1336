"""Directory with the config and the tokenizer of a GGUF file, which vLLM takes for a checkpoint.

Its config names the file as what the weights are dequantised from.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from huggingface_hub import hf_hub_download
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.models.quantized.gguf.architectures import architecture_of, config_of_file
from model_runner_base.models.quantized.gguf.file import GgufFile

METHOD = "gguf"
"""The ``quant_method`` of such a config, whose ``file`` is the path; vLLM's name of the method and the load format."""
_LEFT_OUT = ("quantization_config", "compression_config")
_directories: list[TemporaryDirectory[str]] = []
"""Directories that are removed when the process ends."""


def refuse_quant_names(model: str) -> None:
    """Raises UnsupportedConfigError for a name that leaves it to vLLM which GGUF file of a repository is meant."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+:(UD-)?(I?Q\d\w*|B?F16|F32|TQ\d\w*|MXFP4\w*)", model):
        repository = model.partition(":")[0]
        raise UnsupportedConfigError(
            f"{model} names a type of numbers, not a file: name the GGUF file, as {repository}/<file>.gguf"
        )


@dataclass(frozen=True)
class HubAccess:
    """vLLM's options of downloads from the hub."""

    revision: str | None = None
    hf_token: bool | str | None = None
    download_dir: str | None = None


def local_file(model: str, access: HubAccess) -> Path:
    """The file of a name that ends in ``.gguf``; one of the hub, ``owner/repository/file``, is downloaded."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.resolve()
    owner, _, rest = model.partition("/")
    repository, _, name = rest.partition("/")
    if not re.fullmatch(r"[\w-][\w.-]*", owner) or not repository or not name:
        raise CheckpointError(f"there is no file {model}: name a GGUF file, or one of the hub as owner/repository/file")
    try:
        downloaded = hf_hub_download(
            f"{owner}/{repository}",
            name,
            revision=access.revision,
            cache_dir=access.download_dir,
            token=access.hf_token,
        )
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"there is no file {model}, and the hub gives none: {reason}") from None
    return Path(downloaded).absolute()


def as_checkpoint(
    model: str,
    access: HubAccess,
    hf_config_path: str | None = None,
    trust_remote_code: bool = False,
    has_tokenizer: bool = True,
) -> Path:
    """Makes the directory of a file, which stays until the process ends; raises an error for a file that cannot be
    served.

    Args:
        hf_config_path: the model that the file was made from, if its config is to be read in place of the metadata.
        has_tokenizer: whether the directory has the file's tokenizer too.
    """
    path = local_file(model, access)
    token = access.hf_token if hf_config_path is not None else None
    return _made(path, path.stat().st_mtime_ns, hf_config_path, token, trust_remote_code, has_tokenizer)


@cache
def _made(
    path: Path,
    changed_at: int,
    hf_config_path: str | None,
    hf_token: bool | str | None,
    trust_remote_code: bool,
    has_tokenizer: bool,
) -> Path:
    file = GgufFile(path)
    architecture_of(file)
    _directories.append(TemporaryDirectory(prefix="gguf-"))
    directory = Path(_directories[-1].name) / path.stem
    directory.mkdir()
    if hf_config_path is None:
        config = config_of_file(file)
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GenerationConfig(**ids).save_pretrained(directory)
    else:
        config = _config_at(hf_config_path, hf_token, trust_remote_code)
        with suppress(OSError):  # Not every model has one.
            GenerationConfig.from_pretrained(hf_config_path, token=hf_token).save_pretrained(directory)
    if has_tokenizer:
        _write_tokenizer(path, directory)
    # Numbers of files have more bits than those of the models, which most had in bfloat16.
    config = {"dtype": "bfloat16", "torch_dtype": "bfloat16"} | config
    config["quantization_config"] = {"quant_method": METHOD, "file": str(path)}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _config_at(path: str, hf_token: bool | str | None, trust_remote_code: bool) -> dict[str, Any]:
    found, _ = PretrainedConfig.get_config_dict(path, token=hf_token, trust_remote_code=trust_remote_code)
    config = {name: value for name, value in found.items() if name not in _LEFT_OUT}
    if not config:
        raise CheckpointError(f"{path} has no config.json: name the model that the GGUF file was made from")
    return config


def _write_tokenizer(path: Path, directory: Path) -> None:
    remedy = "set tokenizer to the model that the file was made from"
    if int(transformers.__version__.partition(".")[0]) < 5:  # It takes other tokens for the end, and for words.
        raise UnsupportedConfigError(
            f"the tokenizer in {path} needs transformers 5, since {transformers.__version__} reads another: {remedy}"
        )
    try:
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(directory)
    except Exception as error:  # The libraries raise errors of all kinds.
        reason = str(error).partition("\n")[0] or repr(error)
        raise UnsupportedConfigError(f"the tokenizer in {path} cannot be read ({reason}): {remedy}") from error
