"""Puts a deliberate fault into the base of one process: the tree stays as it is."""

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from mutation import Mutation

BASE = Path(__file__).parents[2] / "model_runner_base"


class FaultyFile(SourceFileLoader):
    """Loader of a module from a text in place of its file's; nothing is compiled for others."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text.encode()

    def path_stats(self, path: str) -> dict[str, float]:
        """Raises OSError: then Python neither looks for a compiled file nor writes one."""
        raise OSError


class FaultyModule(MetaPathFinder):
    """Finder of the one module that a fault is in."""

    def __init__(self, mutation: Mutation) -> None:
        self._file = str(BASE / mutation.file)
        text = Path(self._file).read_text()
        self._text = text.replace(mutation.old, mutation.new, 1) if mutation.old else text

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin != self._file:
            return None
        spec.loader = FaultyFile(name, self._file, self._text)
        return spec
