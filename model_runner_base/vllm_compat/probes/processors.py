"""Custom logits processors of a user and of installed plugins, before they are loaded by vLLM."""

from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP, LogitsProcessor

from model_runner_base.vllm_compat.probes.config import setting, uses_slot_processors


def plugins_with_processors() -> list[str]:
    """Names of installed plugins with logits processors."""
    return [each.name for each in entry_points(group=LOGITSPROCS_GROUP)]


def has_custom_processors(vllm_config: Any) -> bool:
    """Whether the user or a plugin adds logits processors."""
    return bool(setting(vllm_config, "model_config.logits_processors") or plugins_with_processors())


def wrong_processors(vllm_config: Any) -> list[str]:
    """Names of processors with the interface of vLLM's first model runner, where only that of the second serves."""
    if not uses_slot_processors(vllm_config):
        return []
    named = setting(vllm_config, "model_config.logits_processors") or ()
    loaded = [resolve_name(each) if isinstance(each, str) else each for each in named]
    loaded += [each.load() for each in entry_points(group=LOGITSPROCS_GROUP)]
    return [each.__name__ for each in loaded if isinstance(each, type) and issubclass(each, LogitsProcessor)]
