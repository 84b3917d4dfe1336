"""Fixtures: tiny checkpoints, and real engines that are shut down after use."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# One process, so that tests can look into the engine; tests of the other ways to run start processes of their own.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Tiny models: threads wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import vllm.model_executor.models.registry
from vllm import LLM
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from model_runner_base.testing.models import CONFIGS, TinyModel, make_checkpoint

# Elsewhere vLLM looks at a model's class in a process of its own, which costs seconds for each architecture.
vllm.model_executor.models.registry._run_in_subprocess = lambda function: function()

BUNDLED_MODEL = Path(__file__).parents[1] / "examples" / "models" / "kjv-2m"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes the tiny checkpoint of an architecture, once."""
    directory = tmp_path_factory.mktemp("models")
    return lambda name: make_checkpoint(name, directory)


@contextmanager
def engine(model: str | Path, **options: Any) -> Iterator[LLM]:
    """A real engine on token ids, small unless asked otherwise."""
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 8 << 20,
        "disable_log_stats": False,
    }
    llm = LLM(str(model), **(defaults | options))
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


__all__ = ["BUNDLED_MODEL", "CONFIGS", "engine"]
