"""Fixtures of the checks."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from model_runner_base.testing.block_sparse_models import make_block_sparse
from model_runner_base.testing.compressed_models import make_compressed
from model_runner_base.testing.engine import DEFAULTS, Engines, cache_bytes
from model_runner_base.testing.models import TinyModel, make_checkpoint, reference_model
from model_runner_base.testing.order import sort_checks
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.profiles import leave_out, profile_of
from model_runner_base.testing.server import flags, served
from model_runner_base.testing.table import FAILED
from model_runner_base.testing.tokenizer import add_tokenizer
from model_runner_base.vllm_compat.probes.config import HAS_SLOT_PROCESSORS
from model_runner_base.vllm_compat.probes.experts import IS_ONE_MODULE
from model_runner_base.vllm_compat.probes.indexers import SHARES_CHOICES
from model_runner_base.vllm_compat.probes.models import CHOOSES_BACKENDS
from model_runner_base.vllm_compat.types.mixed_prompts import HAS_MIXED_PROMPTS


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out checks of what this release of vLLM does not have."""
    is_there = {
        "test_later_experts.py": not IS_ONE_MODULE,
        "test_later_parameters.py": HAS_SLOT_PROCESSORS,
        "test_sparse_attention.py": SHARES_CHOICES,
        "test_unequal_heads.py": CHOOSES_BACKENDS,
        "test_mixed_prompts.py": HAS_MIXED_PROMPTS,
    }
    return None if is_there.get(collection_path.name, True) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Brings the checks into the kit's order, and leaves out those that the profile does not have.

    It comes after pytest's own choice: the first case of a check is the first of those that ``-k`` leaves.
    """
    sort_checks(items)
    if left_out := leave_out(profile_of(config), items):
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes the tiny checkpoint of an architecture, once: ``tiny_model("llama")``."""
    directory = tmp_path_factory.mktemp("models")

    def make(name: str) -> TinyModel:
        model = make_checkpoint(name, directory)
        reference_model(model.path)  # Before an engine: vLLM's Transformers backend changes transformers' class.
        return model

    return make


@pytest.fixture(scope="session")
def block_sparse_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny MiniMax M3, made before an engine, as in ``tiny_model``."""
    model = make_block_sparse(tmp_path_factory.mktemp("block-sparse"))
    reference_model(model.path)
    return model


@pytest.fixture(scope="session")
def compressed_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny DeepSeek V4, made before an engine, as in ``tiny_model``."""
    model = make_compressed(tmp_path_factory.mktemp("compressed") / "model")
    reference_model(model.path)
    return model


@pytest.fixture(scope="session")
def engines(pytestconfig: pytest.Config) -> Iterator[Engines]:
    """Keeps one engine alive for the checks that share it."""
    option = pytestconfig.getoption
    engines = Engines(option("worker"), option("eager"), **option("engine_options"))
    yield engines
    engines.close()
    # What is frozen would never be freed, and bindings of C++ libraries print all that lives until the process ends.
    gc.unfreeze()


@pytest.fixture
def engine(engines: Engines, request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """``engine(model.path, **options)``: an LLM on the worker under test, its prefix cache empty.

    It is the last check's engine if that had the same options. The engine of a check that fails, or in
    whose middle the device refuses, is closed.
    """
    yield engines.get
    if request.node.stash.get(FAILED, False):
        engines.close()


Serve = Callable[..., AbstractContextManager[str]]
"""``serve(**options)``: context with the base URL of vLLM's OpenAI server, whose model is named "kit"."""


@pytest.fixture(scope="session")
def serve(
    engines: Engines, text_model: TinyModel, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Serve:
    """Starts servers of the text model with the device, in processes of their own. This process then has no engine."""
    option = pytestconfig.getoption

    def start(**own: Any) -> AbstractContextManager[str]:
        engines.close()  # The device may serve one process at a time.
        device = {"worker_cls": option("worker"), "enforce_eager": option("eager")}
        options = DEFAULTS | {"dtype": PRECISION.name} | device | option("engine_options")
        options |= {"skip_tokenizer_init": False, "served_model_name": "kit"} | own
        log = tmp_path_factory.mktemp("server") / "log"
        return served(text_model.path, option("platform"), log, *flags(options))

    return start


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
