"""Compiled loops that are kept on disk: which version of a file's code a process gets."""

import ast
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
from filelock import FileLock, Timeout
from numba.core.caching import IndexDataCacheFile

from model_runner_base.step import host_loops
from model_runner_base.step.host_loops import cache_folder, compiling, files_of

LOOP = """from model_runner_base.step.host_loops import compiled


@compiled
def loop(n):
    return n * {factor}
"""

CALLER = """from model_runner_base.step.host_loops import compiled


@compiled
def loop(n):
    return called(n) + 1
"""
BASE = Path(host_loops.__file__).parent.parent
LOOPS = sorted(
    ".".join(file.relative_to(BASE.parent).with_suffix("").parts)
    for file in BASE.rglob("*.py")
    if "\n@compiled\n" in file.read_text()
)
"""Modules of the base that have loops."""


def loop_of(path: Path) -> Callable[[int], int]:
    """The loop of a file, as a process that imports it now has it."""
    spec = importlib.util.spec_from_file_location("kept_loop", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.loop


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python's own files tell versions by seconds.
    return tmp_path / "loops.py"


def test_a_process_that_starts_while_another_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process finds that numba has written which code belongs to the new file, and not the code yet."""
    path.write_text(LOOP.format(factor=2))
    assert loop_of(path)(7) == 14
    path.write_text(LOOP.format(factor=3))
    with monkeypatch.context() as half_way:
        half_way.setattr(IndexDataCacheFile, "_save_data", lambda *_: None)
        assert loop_of(path)(7) == 21
    assert loop_of(path)(7) == 21


def test_code_of_another_numba(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that another version of numba has written are not read, whether or not they could be."""
    path.write_text(LOOP.format(factor=2))
    with monkeypatch.context() as another:
        another.setattr(numba, "__version__", "0.0.1")
        assert loop_of(path)(7) == 14
    for kept in path.parent.rglob("*.nbc"):
        kept.write_bytes(b"cold")  # pickle reads it as nothing it knows.
    with monkeypatch.context() as half_way:
        half_way.setattr(IndexDataCacheFile, "_save_data", lambda *_: None)
        assert loop_of(path)(7) == 14
    assert loop_of(path)(7) == 14


def test_a_file_that_stays_the_same_is_compiled_once(path: Path) -> None:
    path.write_text(LOOP.format(factor=2))
    assert loop_of(path)(7) == 14
    again = loop_of(path)
    assert again(7) == 14
    assert sum(again.stats.cache_hits.values()) == 1  # type: ignore[attr-defined]


def test_a_loop_of_another_file_changes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop calls one of another file, and only that file gets a new version."""
    monkeypatch.syspath_prepend(path.parent)
    called = path.with_name("called_loops.py")
    path.write_text(f"from called_loops import loop as called\n{CALLER}")
    for factor in (2, 3):
        sys.modules.pop("called_loops", None)
        called.write_text(LOOP.format(factor=factor))
        assert loop_of(path)(7) == 7 * factor + 1


@pytest.mark.parametrize("module", LOOPS)
def test_loops_read_no_value_of_another_file(module: str) -> None:
    """Loops use other loops alone of what their file imports from others of this library."""
    loaded = importlib.import_module(module)
    tree = ast.parse(Path(str(loaded.__file__)).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    ours = {name.name for node in imports if (node.module or "").startswith("model_runner_base") for name in node.names}
    loops = [each for each in vars(loaded).values() if hasattr(each, "py_func")]
    assert loops
    own = [loop for loop in loops if loop.__module__ == module]
    for loop in own:
        # A loop that is defined later is not known yet when a file's versions are told apart.
        folder = loop._cache.cache_path
        assert folder is None or str(cache_folder(*files_of(loop.py_func))) in folder, loop
    used = {name for loop in own for name in loop.py_func.__code__.co_names}
    assert [name for name in used & ours if not hasattr(getattr(loaded, name), "py_func")] == []


def test_a_file_that_is_only_newer(path: Path) -> None:
    """A newer file gets a folder of its own: in a shared one numba calls the older code stale, and hands out its
    names again."""
    path.write_text(LOOP.format(factor=2))
    before = cache_folder(path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))
    assert cache_folder(path) != before


def test_lies_in_vllms_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled loops are kept in vLLM's directory. numba's own setting, for other code, stays as it was."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(path.parent / "vllm"))
    path.write_text(LOOP.format(factor=2))
    assert loop_of(path)(7) == 14
    assert [*path.parent.glob("vllm/host_loops/*/*/*.nbc")] and numba.config.CACHE_DIR == ""


def test_one_process_compiles_at_a_time(path: Path) -> None:
    with compiling(), pytest.raises(Timeout):
        FileLock(path.parent / "kept" / "lock").acquire(timeout=0)
    FileLock(path.parent / "kept" / "lock").acquire(timeout=0).lock.release()


def test_without_a_directory_to_write_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(LOOP.format(factor=2))
    path.with_name("file").write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(path.with_name("file")))
    with compiling():
        assert loop_of(path)(7) == 14
