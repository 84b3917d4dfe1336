"""Images over two ranks of tensor parallelism: each rank encodes them with its part of the towers, and gets the tokens
of HF transformers.

Two processes run the engines of all models in turn, each its own rank of them.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import compilations, engine
from lane import HAS_OPENXLA
from torch.multiprocessing.spawn import spawn
from vllm.utils.network_utils import get_open_port

from model_runner_base.testing.checks.test_multimodal import ask, expected, prompts, read
from model_runner_base.testing.images import SeeingModel, make_seeing_model

SHARED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "external_launcher",
    "async_scheduling": False,
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 32,
    "max_model_len": 256,
}
EAGER: dict[str, Any] = {"enforce_eager": True}
FEW_BUCKETS = {"num_batched_tokens_buckets": [32], "num_seqs_buckets": [4], "context_length_buckets": [256]}
COMPILED: dict[str, Any] = {"additional_config": {"neuron_config": FEW_BUCKETS}}
CASES: dict[str, dict[str, Any]] = {"llava": COMPILED} if HAS_OPENXLA else {"llava": EAGER, "qwen3-vl": EAGER}
"""Models, and how they run: a tower of tiles, here as a graph, and one of patches with deeper levels."""


def serve_rank(rank: int, ports: Sequence[int], directory: Path) -> None:
    """Answers all prompts in an engine of each model, as one of its two ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for (name, options), port in zip(CASES.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        model = make_seeing_model(name, directory)
        asked = prompts(model)
        with engine(model.path, **SHARED, **options, **model.limits) as llm:
            before = compilations() if options == COMPILED else None
            assert read(ask(llm, asked)) == expected(model, asked), f"{name} on rank {rank}"
            assert read(ask(llm, asked[::-1])) == expected(model, asked[::-1]), f"{name} on rank {rank}, again"
            assert before is None or compilations() == before


def test_two_ranks(tmp_path: Path) -> None:
    for name in CASES:
        make_seeing_model(name, tmp_path)
    spawn(serve_rank, ([get_open_port() for _ in CASES], tmp_path), nprocs=2)


def test_towers_that_ranks_share_by_images_are_refused(tmp_path: Path) -> None:
    """Refusal of the mode data, in which each rank would encode some of the images, whole."""
    model: SeeingModel = make_seeing_model("qwen3-vl", tmp_path)
    options = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data", "skip_tokenizer_init": False}
    with pytest.raises(ValueError, match="leave out mm_encoder_tp_mode"), engine(model.path, **options):
        pass
