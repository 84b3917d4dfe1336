"""Platform of the device under test, as an installed plugin: processes that vLLM starts find it, too."""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

NAME = "model_runner_base_device_under_test"

REGISTER = f"""
def register():
    return "{NAME}_platform.Platform"
"""
PLATFORM = """
from {module} import {name}

class Platform({name}):
    worker_cls = "{worker}"
"""


def install(platform: str, worker: str, folder: Path) -> None:
    """Makes a plugin in ``folder``, and vLLM take it, whichever platforms are installed."""
    module, _, name = platform.rpartition(".")
    (folder / f"{NAME}.py").write_text(REGISTER)
    (folder / f"{NAME}_platform.py").write_text(PLATFORM.format(module=module, name=name, worker=worker))
    info = folder / f"{NAME}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{NAME} = {NAME}:register\n")
    add_to_path(folder)
    general = [entry.name for entry in entry_points(group="vllm.general_plugins")]
    chosen = os.environ.get("VLLM_PLUGINS")
    os.environ["VLLM_PLUGINS"] = ",".join([NAME, *(general if chosen is None else chosen.split(","))])


def add_to_path(folder: Path) -> None:
    """Puts a folder first on the path of this process, and of those that it starts."""
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def check_worker(worker: str) -> str | None:
    """Returns what to do, if the platform that vLLM found serves with another worker."""
    from vllm.platforms import current_platform

    found = getattr(current_platform, "worker_cls", worker)
    if found == worker:
        return None
    of = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    return f"vLLM found the platform {of}, whose worker is {found}: name {worker}'s own as --platform"
