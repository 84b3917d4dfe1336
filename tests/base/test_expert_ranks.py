"""Expert parallelism: each of two ranks has half of the experts whole, and both have the tokens of HF transformers.

MiniMax M3 is cut as tensor parallelism cuts it: each rank has a half of each expert, and of the KV heads with their
indexers' heads. Where there is one KV head, each rank has it.

Two processes run the engines of all models in turn, each its own rank of them.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import compilations, engine
from lane import HAS_OPENXLA
from torch.multiprocessing.spawn import spawn
from vllm.utils.network_utils import get_open_port

from model_runner_base.testing.block_sparse_models import make_block_sparse
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel, make_checkpoint
from model_runner_base.vllm_compat.probes.experts import experts_layers

PROMPTS = random_prompts(131, [1, 5, 33, 90, 130])
"""Steps of few tokens, for which all experts run, and of many, which are sorted into tiles."""
NEW_TOKENS = 16
EAGER: dict[str, Any] = {"enforce_eager": True}
FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [256]}
COMPILED: dict[str, Any] = {"additional_config": {"neuron_config": FEW_BUCKETS}}
CUT = EAGER | {"enable_expert_parallel": False}
BLOCK_SPARSE = {"block-sparse": 2, "block-sparse-one-head": 1}
"""Names of tiny MiniMax M3, and their numbers of KV heads."""


class Case(NamedTuple):
    """A model, the number of experts that a rank has, and how it runs."""

    name: str
    num_experts: int
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}-{'compiled' if self.options == COMPILED else 'eager'}"


# Softmax; sigmoid in groups with shared experts; then one choice, whose weight is multiplied to the input, or biases.
CASES = (
    [Case("qwen3-moe", 4, COMPILED), Case("deepseek-v3", 4, EAGER), Case("llama4", 4, EAGER)]
    if HAS_OPENXLA
    else [
        Case("qwen3-moe", 4, EAGER),
        Case("deepseek-v3", 4, EAGER),
        Case("gpt-oss", 4, EAGER),
        *(Case(name, 8, CUT) for name in BLOCK_SPARSE),
    ]
)


def serve_rank(rank: int, ports: Sequence[int], directory: Path) -> None:
    """Answers all prompts in an engine of each model, as one of its two ranks; in one of them once more, with weights
    that were loaded again, where vLLM records that."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    for case, port in zip(CASES, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        model = directory / case.name
        options = {"enable_expert_parallel": True, "max_model_len": 256} | ranks | case.options
        with engine(model, **options) as llm:
            before = compilations() if case.options == COMPILED else None
            tokens = tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS)))
            assert before is None or compilations() == before
            again = tokens
            if case.options == COMPILED:
                with pytest.raises(Exception, match=r"enable_expert_parallel.*needs vLLM 0\.33"):
                    llm.collective_rpc("reload_weights")
            elif case.name == "qwen3-moe":  # Experts with biases are not loaded again.
                llm.collective_rpc("reload_weights")
                llm.reset_prefix_cache()
                again = tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS)))
            weights = [layer.weights.w13_weight for _, layer in experts_layers(runner_of(llm).get_model())]
            torch.save((tokens, again, [len(weight) for weight in weights]), directory / f"{case}-{rank}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models and of what each rank answered."""
    directory = tmp_path_factory.mktemp("ranks")
    for case in CASES:
        if case.name in BLOCK_SPARSE:
            make_block_sparse(directory / case.name, num_kv_heads=BLOCK_SPARSE[case.name])
        else:
            make_checkpoint(case.name, directory)
    spawn(serve_rank, ([get_open_port() for _ in CASES], directory), nprocs=2)
    return directory


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks(case: Case, served: Path) -> None:
    model = TinyModel(served / case.name)
    for rank in range(2):
        tokens, again, counts = torch.load(served / f"{case}-{rank}")
        check_equal(model, PROMPTS, tokens, [NEW_TOKENS] * len(PROMPTS))
        assert again == tokens
        assert counts and set(counts) == {case.num_experts}
