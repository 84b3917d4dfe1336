"""The device's own methods and imports fit the installed vLLM: what drifted is named before an engine starts."""

import pytest
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from model_runner_base.testing.interfaces import drifted_methods, missing_imports, modules_with


@pytest.fixture
def worker(pytestconfig: pytest.Config) -> type:
    return resolve_obj_by_qualname(pytestconfig.getoption("worker"))  # type: ignore[no-any-return]


@pytest.fixture
def modules(worker: type) -> list:
    """The loaded modules of the device: those of its worker, runner and platform."""
    classes = [worker, getattr(worker, "model_runner_cls", worker), type(current_platform)]
    return list({module.__name__: module for cls in classes for module in modules_with(cls)}.values())


def test_methods(modules: list, worker: type) -> None:
    """Methods that override one of vLLM's or of the base can be called as that one is."""
    drifted = drifted_methods(modules, [worker, type(current_platform)])
    assert not drifted, "; ".join(drifted)


def test_imports(modules: list) -> None:
    """Names that the device imports from vLLM or the base, also inside functions, exist."""
    missing = missing_imports(modules)
    assert not missing, f"not in this release: {'; '.join(missing)}"
