"""The conformance kit over a base with a deliberate fault, in a process that is forked from one with vLLM imported.

The tree stays as it is: the fork imports one module of the base from the faulty text, and all others from their files.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from mutation import Mutation

BASE = Path(__file__).parents[2] / "model_runner_base"


class FaultyFile(SourceFileLoader):
    """Loads a module from a text in place of its file's; nothing is compiled for others."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text.encode()

    def path_stats(self, path: str) -> dict[str, float]:
        """Raises OSError: then Python neither looks for a compiled file nor writes one."""
        raise OSError


class FaultyModule(MetaPathFinder):
    """Finds the one module that a fault is in."""

    def __init__(self, mutation: Mutation) -> None:
        self._file = str(BASE / mutation.file)
        self._text = (BASE / mutation.file).read_text()
        if mutation.old:
            self._text = self._text.replace(mutation.old, mutation.new, 1)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin != self._file:
            return None
        spec.loader = FaultyFile(name, self._file, self._text)
        return spec


def run_kit(mutation: Mutation, directory: Path, printed: Path) -> None:
    """The kit's command on the example device or, from ``directory``, on a variant of it; ends the process."""
    import vllm.platforms
    from vllm_alone import PLATFORM

    loaded = [name for name in sys.modules if name.startswith("model_runner_base")]
    assert not loaded, f"{loaded} came before the fault"
    out = os.open(printed, os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(directory)
    sys.path[:0] = [str(directory), str(BASE.parent)]
    sys.meta_path.insert(0, FaultyModule(mutation))
    import examples.plain_device

    # For those modules of vLLM that have asked. The kit puts the platform in place for all others.
    PLATFORM.__class__ = examples.plain_device.PlainPlatform
    vllm.platforms._current_platform = None
    from model_runner_base.testing import __main__ as command

    device = [f"{mutation.device}.PlainWorker", "--platform", f"{mutation.device}.PlainPlatform"]
    sys.exit(command.main([*device, "-x", "--no-shrinking", "--assert=plain", "-k", mutation.selection]))
