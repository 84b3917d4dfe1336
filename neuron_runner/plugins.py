"""vLLM's other platform plugins: whether one of them answers, so that ours can leave the machine to it."""

from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points

from vllm import envs
from vllm.plugins import PLATFORM_PLUGINS_GROUP

OWN_NAME = "neuron"
"""Name of this plugin among vLLM's platform plugins."""

_being_asked: ContextVar[str | None] = ContextVar("_being_asked", default=None)
"""Name of the plugin that this one is asking."""


def other_plugin_that_answers() -> str | None:
    """Name of another platform plugin that takes this machine; None if there is none.

    Like vLLM this passes over plugins that VLLM_PLUGINS leaves out, and over those that raise. A plugin may in turn ask
    this one. No further plugins are asked then: of two plugins that yield to each other, the first by name answers.
    """
    if (asked := _being_asked.get()) is not None:
        return asked if asked < OWN_NAME else None
    return next((plugin.name for plugin in _other_plugins() if _answers(plugin)), None)


def _other_plugins() -> list[EntryPoint]:
    # Of plugins with the same name vLLM keeps the last.
    plugins = {plugin.name: plugin for plugin in entry_points(group=PLATFORM_PLUGINS_GROUP)}
    allowed = envs.VLLM_PLUGINS
    return [
        plugin
        for plugin in plugins.values()
        if plugin.module != __package__ and (allowed is None or plugin.name in allowed)
    ]


def _answers(plugin: EntryPoint) -> bool:
    token = _being_asked.set(plugin.name)
    try:
        return plugin.load()() is not None
    except Exception:
        return False  # vLLM asks it too, and logs the error.
    finally:
        _being_asked.reset(token)
