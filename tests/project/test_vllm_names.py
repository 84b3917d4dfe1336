"""Names of vLLM's that the project imports exist in each vLLM that it runs on; one module asks which vLLM this is."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from lane import HAS_OPENXLA, NEWEST, ROOT

BASE = ROOT / "model_runner_base"
PORTS = (
    BASE / "vllm_compat",
    BASE / "scheduling" / "releases.py",
    BASE / "heads" / "pooling" / "metadata.py",
    BASE / "heads" / "sampling" / "slot_processors.py",
    BASE / "testing" / "scheduler_outputs.py",
    BASE / "testing" / "slot_processors.py",
    BASE / "testing" / "upstream" / "source.py",
    ROOT / "gpu_runner" / "vllm_compat.py",
)
PACKAGES = ("model_runner_base", "gpu_runner", "neuron_runner", "examples", "benchmarks")
TESTS = [path for path in (ROOT / "tests").rglob("*.py") if HAS_OPENXLA]
TESTS = TESTS or [ROOT / "tests" / name for name in NEWEST]


class Name(NamedTuple):
    module: str
    name: str | None
    """Name that is imported; None where it is the module itself."""
    place: str

    @property
    def is_there(self) -> bool:
        try:
            module = import_module(self.module)
        except ModuleNotFoundError:
            return False
        if self.name is None or hasattr(module, self.name):
            return True
        try:
            import_module(f"{self.module}.{self.name}")
        except ModuleNotFoundError:
            return False
        return True


def is_port(path: Path) -> bool:
    return any(path == port or port in path.parents for port in PORTS)


def names_of(path: Path) -> Iterator[Name]:
    """Names of vLLM's that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield Name(str(node.module), alias.name, f"{path.relative_to(ROOT)}:{node.lineno}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    yield Name(alias.name, None, f"{path.relative_to(ROOT)}:{node.lineno}")


SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not is_port(path)]


def test_names_are_there() -> None:
    found = [name for path in (*SOURCES, *TESTS) for name in names_of(path)]
    assert len({(name.module, name.name) for name in found}) > 100
    assert [name for name in found if not name.is_there] == []


def test_a_name_that_is_gone_is_found() -> None:
    assert not Name("vllm.v1", "no_such_name", "").is_there and not Name("vllm.no_such_module", "LLM", "").is_there
    assert Name("vllm", "LLM", "").is_there and Name("vllm.v1", "core", "").is_there and Name("vllm", None, "").is_there


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_who_asks_for_a_version(path: Path) -> None:
    """No import of vLLM's is tried and given up. Nothing reads its version, or looks for a module but the kernels."""
    tree = ast.parse(path.read_text())
    text = ast.unparse(tree).replace("find_spec('vllm._C')", "")
    for question in ("vllm.__version__", "version('vllm')", "find_spec('vllm", "import_module('vllm"):
        assert question not in text, question
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(each.type or node) for each in node.handlers):
            tried = ast.unparse(ast.Module(node.body, []))
            assert "from vllm" not in tried and "import vllm" not in tried, f"line {node.lineno}"
