"""Fixtures of the checks."""

from collections.abc import Callable, Iterator

import pytest
from vllm import LLM

from model_runner_base.testing.engine import Engines
from model_runner_base.testing.models import TinyModel, make_checkpoint
from model_runner_base.testing.table import FAILED


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes the tiny checkpoint of an architecture, once: ``tiny_model("llama")``."""
    directory = tmp_path_factory.mktemp("models")
    return lambda name: make_checkpoint(name, directory)


@pytest.fixture(scope="session")
def engines(pytestconfig: pytest.Config) -> Iterator[Engines]:
    """Keeps one engine alive for the checks that share it."""
    engines = Engines(pytestconfig.getoption("worker"), pytestconfig.getoption("eager"))
    yield engines
    engines.close()


@pytest.fixture
def engine(engines: Engines, request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """``engine(model.path, **options)``: an LLM on the worker under test, its prefix cache empty.

    It is the one that the last check used if that had the same options. A check that fails takes its engine with it.
    """
    yield engines.get
    if request.node.stash.get(FAILED, False):
        engines.close()
