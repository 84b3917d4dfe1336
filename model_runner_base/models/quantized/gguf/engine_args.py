"""Has vLLM serve a GGUF file as the checkpoint that is made for it, a directory."""

from functools import wraps
from typing import Any

from vllm.engine import arg_utils
from vllm.platforms import current_platform

from model_runner_base.models.quantized.gguf.checkpoint import METHOD, HubAccess, as_checkpoint, refuse_quant_names
from model_runner_base.models.quantized.gguf.file import is_gguf
from model_runner_base.vllm_compat.patches.wrap_once import wrap_once


def serve_gguf_files() -> None:
    """Puts the directory of a GGUF file in the file's place, unless the platform has kernels for such files.

    Newer releases of vLLM do not know these files, and would say that they find no model. Older ones would read them
    for kernels of their own.
    """
    module: Any = arg_utils
    wrap_once(module, "maybe_override_with_speculators", _but_for_gguf)  # The first to look at the model.
    wrap_once(arg_utils.EngineArgs, "create_model_config", _with_directories)


def _has_kernels() -> bool:
    return METHOD in current_platform.supported_quantization


def _but_for_gguf(look_at: Any) -> Any:
    @wraps(look_at)
    def maybe_override_with_speculators(
        model: Any, tokenizer: Any = None, *args: Any, vllm_speculative_config: Any = None, **kwargs: Any
    ) -> Any:
        if not _has_kernels():
            refuse_quant_names(str(model))
            if is_gguf(model):
                return model, tokenizer, vllm_speculative_config  # A file is no model of speculators.
        return look_at(model, tokenizer, *args, vllm_speculative_config=vllm_speculative_config, **kwargs)

    return maybe_override_with_speculators


def _with_directories(create: Any) -> Any:
    @wraps(create)
    def create_model_config(self: Any) -> Any:
        if not _has_kernels():
            if is_gguf(self.model):
                _replace_model(self)
            draft = self.speculative_config
            if isinstance(draft, dict) and is_gguf(draft.get("model")):
                access = HubAccess(draft.get("revision"), self.hf_token, self.download_dir)
                path = as_checkpoint(draft["model"], access, has_tokenizer=False)
                self.speculative_config = draft | {"model": str(path)}
        return create(self)

    return create_model_config


def _replace_model(args: Any) -> None:
    """Changes the arguments of an engine, which keeps the name that its model was given."""
    path = as_checkpoint(
        args.model,
        HubAccess(args.revision, args.hf_token, args.download_dir),
        args.hf_config_path,
        args.trust_remote_code,
        has_tokenizer=args.tokenizer is None and not args.skip_tokenizer_init,
    )
    if args.served_model_name is None:
        args.served_model_name = args.model
    args.model, args.hf_config_path, args.revision = str(path), None, None
    if args.quantization == METHOD:
        args.quantization = None
    if args.load_format == METHOD:
        args.load_format = "auto"
