"""Another vendor's platform plugin, which answers as the variable ACME says. The tests write its entry point."""

import os
from importlib.metadata import entry_points

from vllm.platforms.interface import UnspecifiedPlatform


class AcmePlatform(UnspecifiedPlatform):
    """The vendor's platform."""


def register() -> str | None:
    """The platform's class where ACME is "answers", or is "yields" and no other plugin answers."""
    how = os.environ["ACME"]
    if how == "raises":
        raise RuntimeError("the driver of acme is broken")
    if how == "yields":
        others = [plugin for plugin in entry_points(group="vllm.platform_plugins") if plugin.module != __name__]
        how = "silent" if any(plugin.load()() for plugin in others) else "answers"
    return "acme_plugin.AcmePlatform" if how == "answers" else None
