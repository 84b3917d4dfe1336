"""Pooling decoders over two ranks of tensor parallelism: each rank has the values of HF transformers.

Two processes run the engines of all models in turn, each its own rank of them.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import compilations, engine
from lane import HAS_OPENXLA
from torch.multiprocessing.spawn import spawn
from vllm.tasks import POOLING_TASKS
from vllm.utils.network_utils import get_open_port

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.pooling import make_pooling_model
from model_runner_base.testing.pooling_requests import check_arrivals, check_values, pool

PROMPTS = random_prompts(95, [1, 2, 17, 40, 64, 90, 128, 33])
SHARED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "external_launcher",
    # Each rank has a scheduler of its own. When a result is there early, an asynchronous one frees a row earlier.
    "async_scheduling": False,
}
LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4}
IN_CHUNKS: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": 32}
FEW_BUCKETS = {"num_batched_tokens_buckets": [128], "num_seqs_buckets": [4], "context_length_buckets": [128]}
COMPILED: dict[str, Any] = {
    "max_num_batched_tokens": 128,
    "additional_config": {"neuron_config": FEW_BUCKETS},
}
CASES: dict[str, dict[str, Any]] = {"qwen3": IN_CHUNKS} | (
    {"qwen2-reward": IN_CHUNKS, "qwen3-classes": COMPILED} if HAS_OPENXLA else {}
)
"""Models, and how they run. Layers of the reward model's own are cut, too; a classifier is whole on each rank."""
WITH_TOKENS = "score" in POOLING_TASKS
"""Whether an engine of this release serves vectors of prompts and of tokens at once."""


def serve_rank(rank: int, ports: Sequence[int], directory: Path) -> None:
    """Checks all values of an engine of each model, as one of its two ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for (name, options), port in zip(CASES.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        model = make_pooling_model(name, directory)
        with engine(model.path, **model.options, **SHARED, **LIMITS, **options) as llm:
            before = compilations() if options == COMPILED else None
            check_values(model, PROMPTS, pool(llm, PROMPTS, model.task), model.task)
            if name == "qwen3" and WITH_TOKENS:
                tasks = ["embed", "token_embed"] * (len(PROMPTS) // 2)
                check_arrivals(llm, model, PROMPTS, tasks, np.random.default_rng(8))
            assert before is None or compilations() == before


def test_two_ranks(tmp_path: Path) -> None:
    for name in CASES:
        make_pooling_model(name, tmp_path)
    spawn(serve_rank, ([get_open_port() for _ in CASES], tmp_path), nprocs=2)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("qwen3-reranker", {}, "Qwen3ForSequenceClassification.* tokens of the vocabulary.* tensor_parallel_size=1"),
        ("llama-two-sided", {}, "see all of their text.* tensor_parallel_size=1"),
        ("qwen3", {"enable_lora": True}, "adapters of pooling models.* tensor_parallel_size=1"),
    ],
)
def test_what_ranks_cannot_share_is_refused(name: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = make_pooling_model(name, tmp_path)
    sizes = LIMITS | {"max_num_batched_tokens": 128, "enforce_eager": True, "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match=words), engine(model.path, **model.options | sizes | options):
        pass
