"""Allow-list of vLLM's tests: which run, what is changed in them, and which are expected to fail."""

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LISTS = Path(__file__).parent / "lists"


class ListError(Exception):
    """Error in an allow-list, in a line."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Tolerance(_Strict):
    """Tolerance of ``torch.testing.assert_close`` in a file's tests."""

    rtol: float
    atol: float


class TestFile(_Strict):
    """A file of vLLM's tests. Each of its tests must pass, unless a pattern below names it."""

    expected: dict[str, str] = {}
    """Reasons, by pattern, of tests that may fail. They run."""
    not_run: dict[str, str] = {}
    """Reasons, by pattern, of tests that do not run."""
    import_as: list[str] = []
    """Questions about its kind that the platform answers with True while the file is imported."""
    attributes: dict[str, Any] = {}
    """New values of the module's attributes."""
    parameters: dict[str, list[Any]] = {}
    """New values of parameters that tests run with."""
    engine: dict[str, Any] = {}
    """Options of each engine that a test starts, in place of its own."""
    environment: dict[str, str] = {}
    """Environment variables."""
    schedulers: bool = False
    """Whether the tests make schedulers without a worker. Those are this library's then, and the device's limits do not
    count."""
    tolerance: Tolerance | None = None


class AllowList(_Strict):
    """Tests of one release."""

    models: dict[str, str]
    """Tiny checkpoints in place of models, by the models' names: a name of ``stand_ins.KINDS``."""
    adapters: dict[str, str] = {}
    """LoRA adapters in place of published ones, by the names of those: the tiny checkpoint that each is for."""
    defaults: dict[str, Any] = {}
    """Options of each engine, where a test leaves them open."""
    files: dict[str, TestFile] = Field(min_length=1)
    """Files, by their path under ``tests``."""

    def joined(self, other: "AllowList") -> "AllowList":
        """Returns this list with the entries of another one, which go before."""
        files = dict(self.files)
        for path, file in other.files.items():
            old, new = files.get(path, TestFile()).model_dump(), file.model_dump(exclude_unset=True)
            merged = {key: old[key] | value if isinstance(old[key], dict) else value for key, value in new.items()}
            files[path] = TestFile(**old | merged)
        return AllowList(
            models=self.models | other.models,
            adapters=self.adapters | other.adapters,
            defaults=self.defaults | other.defaults,
            files=files,
        )


def shipped_list(release: str) -> Path:
    """The file for a release of vLLM.

    Raises:
        ListError: there is none.
    """
    path = LISTS / f"vllm_{'_'.join(release.split('.')[:2])}.toml"
    if not path.exists():
        known = ", ".join(sorted(file.stem.removeprefix("vllm_").replace("_", ".") for file in LISTS.glob("*.toml")))
        raise ListError(f"no list for vLLM {release}, only for {known}: name a file of your own as --list")
    return path


def read_list(path: Path) -> AllowList:
    """Reads a list.

    Raises:
        ListError: it cannot be read, or an entry is not what it should be.
    """
    try:
        return AllowList(**tomllib.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        place = " > ".join(str(part) for part in first["loc"])
        raise ListError(f"{path}: {place}: {first['msg']}") from error
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise ListError(f"{path}: {error}") from error


def matching(patterns: dict[str, str], test: str) -> str | None:
    """The first pattern that names a test. ``test_x`` also names ``test_x[...]``."""
    return next((pattern for pattern in patterns if _names(pattern, test)), None)


def _names(pattern: str, test: str) -> bool:
    # Square brackets are those of pytest's parameters here, not fnmatch's sets.
    literal = pattern.replace("[", "[[]")
    return fnmatchcase(test, literal) or fnmatchcase(test, f"{literal}[[]*")
