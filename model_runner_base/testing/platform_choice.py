"""Puts a platform in place of what vLLM's plugin discovery would find."""

from importlib import import_module

import vllm.platforms


def choose_platform(qualified_name: str) -> None:
    """Makes the class the platform of this process, before anything has asked for one.

    The class may be in one module with its worker, whose imports ask for the platform: it must then come above them.

    Raises:
        RuntimeError: vLLM was already asked for the platform, or the class comes too late in its module.
    """
    if vllm.platforms._current_platform is not None:
        raise RuntimeError(
            f"something asked vLLM for its platform before {qualified_name} was in place. Where importing vLLM alone "
            "does, as from 0.24 to 0.27, name the platform in an entry point of the group vllm.platform_plugins instead"
        )
    vllm.platforms.resolve_current_platform_cls_qualname = lambda: qualified_name
    module, _, name = qualified_name.rpartition(".")
    try:
        cls = getattr(import_module(module), name)
    except ImportError as error:
        if "current_platform" in str(error):
            message = f"{qualified_name} must be defined above the imports of its module that ask for the platform"
            raise RuntimeError(message) from error
        raise
    # A module that put its platform in place by itself has set the attribute; otherwise this is the first question.
    if type(vllm.platforms.current_platform) is not cls:
        raise RuntimeError(f"{module} put another platform in place than {name}")
