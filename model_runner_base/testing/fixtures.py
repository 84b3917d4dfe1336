"""Fixtures of the checks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm import LLM

from model_runner_base.testing.engine import Engines, cache_bytes
from model_runner_base.testing.models import TinyModel, make_checkpoint
from model_runner_base.testing.table import FAILED
from model_runner_base.testing.tokenizer import add_tokenizer
from model_runner_base.vllm_compat.probes.config import HAS_SLOT_PROCESSORS
from model_runner_base.vllm_compat.probes.prompts import HAS_MIXED_PROMPTS
from model_runner_base.vllm_compat.probes.unequal_heads import CHOOSES_BACKENDS

SHARING = [
    "start",
    "compilation",
    "device_operations",
    "noise",
    "repeated_numbers",
    "sampling",
    "combinations",
    "seeds",
    "distributions",
    "logprobs",
    "soak",
    "hostile_requests",
    "structured_outputs",
]
"""Groups whose checks share the engine of ``text_engine()``: they run one after the other, before all others.

``start`` ends the run if no engine starts. ``compilation`` comes next, since late compilations show only in a process
that has compiled nothing before.
``structured_outputs`` comes last, since it goes on with another backend's engine."""


FIRST = ["interfaces", "server"]
"""Groups that come before all others: what drifted is named before an engine starts, and a server has the device for
itself while this process has not opened it."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out checks of what this release of vLLM does not have."""
    is_there = {
        "test_later_parameters.py": HAS_SLOT_PROCESSORS,
        "test_unequal_heads.py": CHOOSES_BACKENDS,
        "test_mixed_prompts.py": HAS_MIXED_PROMPTS,
    }
    return None if is_there.get(collection_path.name, True) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the checks so that those that share an engine are adjacent: an engine may take half a minute to start."""
    groups = [f"test_{name}" for name in (*FIRST, *SHARING)]
    items.sort(key=lambda item: groups.index(item.path.stem) if item.path.stem in groups else len(groups))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes the tiny checkpoint of an architecture, once: ``tiny_model("llama")``."""
    directory = tmp_path_factory.mktemp("models")
    return lambda name: make_checkpoint(name, directory)


@pytest.fixture(scope="session")
def engines(pytestconfig: pytest.Config) -> Iterator[Engines]:
    """Keeps one engine alive for the checks that share it."""
    option = pytestconfig.getoption
    engines = Engines(option("worker"), option("eager"), **option("engine_options"))
    yield engines
    engines.close()


@pytest.fixture
def engine(engines: Engines, request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """``engine(model.path, **options)``: an LLM on the worker under test, its prefix cache empty.

    It is the last check's engine if that had the same options. The engine of a check that fails is closed.
    """
    yield engines.get
    if request.node.stash.get(FAILED, False):
        engines.close()


@pytest.fixture(scope="session")
def text_model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    """A tiny checkpoint with a tokenizer."""
    return add_tokenizer(tiny_model("llama"))


@pytest.fixture
def text_engine(engine: Callable[..., LLM], text_model: TinyModel) -> Callable[..., LLM]:
    """``text_engine(**options)``: an engine on ``text_model``; ``is_new`` as ``Engines.get`` has it.

    Its cache holds 448 tokens: four requests of 112 tokens, or one of the longest. Beyond that requests are preempted.
    """

    def start(**options: object) -> LLM:
        defaults = {
            "skip_tokenizer_init": False,
            "kv_cache_memory_bytes": cache_bytes(text_model.path, 448),
            "max_logprobs": -1,
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        }
        return engine(text_model.path, **(defaults | options))

    return start
