"""Fixtures: tiny checkpoints, and real engines that are shut down after use."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lane import HAS_OPENXLA, NEWEST, ROOT

# One process, so that tests can look into the engine; tests of the other ways to run start processes of their own.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# A compiled loop that leaves its arrays would spoil others in silence. What is compiled so lies
# apart, also from what another of pytest's processes compiles.
os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")
os.environ.setdefault("NUMBA_CACHE_DIR", f"{ROOT}/.numba_cache/{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}")
# Tiny models: threads wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Large arrays that come and go: half of the time of some references in transformers is the kernel's, for their pages.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
# And XLA compiles their graphs longer than they run.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import pytest
import quick
import torch
from transformers import PreTrainedModel
from turns import is_due, parts_of
from vllm import LLM

from model_runner_base.models.misfits import misfit_of_reload
from model_runner_base.testing.engine import DEFAULTS, runner_of, shut_down, start, wait_for_sizes
from model_runner_base.testing.fixtures import tiny_model

LONGEST = """
    conformance_openxla mutations conformance device_faults gpu_runner examples real_size acme_device upstream
    recurrent_models image_families pooling images
    gpu_benchmark architectures plain_device wheel tensor_parallel sleep errors lora server streaming_input quantization
    ways_to_run plugins reload serving_while_compiling dynamo latent_attention drafts ray engine_contracts
    pooling_server recurrent_ranks ops prompt_embeds gpu_lora contiguous_cache transcription_server
    drafts_with_images hostile_server smallest_limits small_caches foreign_platform runtime_control compilation
    speculation suffix_decoding trained_heads cutting lora_server benchmarks quantised_models unequal_layers
    embeddings_server gpu_recurrent gguf kimi_linear drafted_prefixes image_ranks latent_adapters
    orphans scales_by_family config_fields engine_ends served_stages stages replicas balanced_replicas ray_stages
    expert_replicas
    prefill_and_decode_servers host_offload soak block_sparse decode_context
""".split()
"""Files that take longest in either lane, some 40 seconds and more; longest first."""

BUNDLED_MODEL = ROOT / "examples" / "models" / "kjv-2m"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if HAS_OPENXLA or collection_path.is_dir():
        return None
    return str(collection_path.relative_to(ROOT / "tests")) not in NEWEST or None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tests of this repository")
    group.addoption("--quick", action="store_true", help="a test of each kind, with a bar: about five minutes")
    group.addoption(
        "--full", action="store_true", help="every random case, not a quarter, the longest tests, and all turns"
    )
    group.addoption("--record", action="store_true", help="write the kit's results to docs_build/kit_results.json")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["TESTS_ARE_FULL"] = str(int(config.getoption("full")))  # Read when a test is imported.
    if config.getoption("quick") and not hasattr(config, "workerinput"):
        config.option.verbose -= 1  # The bar takes the place of the names of files.
        config.pluginmanager.register(quick.Bar())
    config.addinivalue_line("markers", "openxla: needs torch_xla, which the newest vLLM is not made for")
    config.addinivalue_line("markers", "full: takes minutes for what others show in part, so it runs with --full")
    config.addinivalue_line("markers", "once: one lane is enough for it, which is the one with torch_xla")
    config.addinivalue_line("markers", "newest: one lane is enough for it, which is the newest")
    config.addinivalue_line(
        "markers", "in_turns(parts=3): one part of its cases runs at a commit; all with --full, or by name"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the tests, longest first, so that no process is left alone with a long one at the end."""
    if not config.getoption("full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if not config.getoption("full") and not config.getoption("quick"):
        is_named = config.option.keyword or any("::" in each or each.endswith(".py") for each in config.args)
        chosen = {item for item in items if is_named or is_due(*parts_of(item))}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if config.getoption("quick"):
        config.hook.pytest_deselected(items=[item for item in items if not quick.kind_of(item.nodeid)])
        items[:] = [item for item in items if quick.kind_of(item.nodeid)]
    the_others = {"newest": "the other lane runs it"}
    if not HAS_OPENXLA:
        the_others = {"openxla": "torch_xla is not there", "once": "the other lane runs it"}
    for item in items:
        for name, reason in the_others.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
    files = [f"test_{name}" for name in LONGEST]
    items.sort(key=lambda item: files.index(item.path.stem) if item.path.stem in files else len(files))


@pytest.fixture(scope="module", autouse=True)
def process_groups_end() -> Iterator[None]:
    """Ends the process groups of engines to which a test still referred when their contexts ended."""
    yield
    if torch.distributed.is_initialized():
        shut_down()


@contextmanager
def unchanged_classes() -> Iterator[None]:
    """Context after which classes of transformers are as before. vLLM's Transformers backend changes them in place, and
    no later test of this process could make a model of one."""
    modules = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    members = {id(each): each for module in modules for each in vars(module).values() if isinstance(each, type)}
    kept = [(each, each.__bases__, dict(vars(each))) for each in members.values() if issubclass(each, PreTrainedModel)]
    try:
        yield
    finally:
        for each, bases, own in kept:
            if each.__bases__ != bases:
                each.__bases__ = bases
                for name in ("__init__", "__call__"):
                    if name in own:
                        setattr(each, name, own[name])
                    else:
                        delattr(each, name)


@contextmanager
def engine(model: str | Path, **options: Any) -> Iterator[LLM]:
    """A real engine on token ids, as small as the kit's unless asked otherwise; the model's length is its own.

    All of its sizes are compiled.
    """
    with unchanged_classes():
        yield from _running(model, **options)


def _running(model: str | Path, **options: Any) -> Iterator[LLM]:
    llm = start(model, **(DEFAULTS | {"max_model_len": None} | options))
    try:
        wait_for_sizes(llm)
        check_that_its_checkpoint_fits(llm)
        yield llm
    finally:
        if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
            llm.llm_engine.engine_core.shutdown()  # A test that still holds the engine would keep its workers busy.
        del llm
        shut_down()


def check_that_its_checkpoint_fits(llm: LLM) -> None:
    """Checks that a reload of the checkpoint that an engine runs, of whatever family and format, would be begun."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None and llm.llm_engine.vllm_config.parallel_config.world_size == 1:
        assert misfit_of_reload(llm.llm_engine.model_config, runner_of(llm).model) is None


def compilations() -> object:
    """Compilations so far; two answers are equal if nothing was compiled between them."""
    if not HAS_OPENXLA:
        return None
    from neuron_runner.metrics import CompilationCount

    return CompilationCount.now()


__all__ = ["BUNDLED_MODEL", "compilations", "engine", "tiny_model", "unchanged_classes"]
