"""Drafts with what Neuron adds: rounded weights, and graphs that are cut at their collectives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import engine
from greedy import expected, generate
from test_quantization import INT8, rounded_checkpoint
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import metric
from model_runner_base.testing.models import TinyModel
from neuron_runner.metrics import CompilationCount

PROMPTS = random_prompts(30, [5, 30, 70])
FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [128]}


def share_accepted(llm: LLM) -> float:
    drafted, accepted = (metric(llm, f"vllm:spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
    return accepted / drafted


def count_of_rank(worker: Any) -> CompilationCount:
    return CompilationCount.now()


def test_rounded_weights_draft_and_verify(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """The draft is the model once more, so its drafts are all right only if its weights are rounded alike."""
    model = tiny_model("llama")
    config = speculation("same", model)
    with engine(model.path, max_model_len=128, speculative_config=config, additional_config=INT8) as llm:
        before = CompilationCount.now()
        assert generate(llm, PROMPTS) == expected(rounded_checkpoint(model, tmp_path / "rounded"), PROMPTS)
        assert CompilationCount.now() == before
        assert share_accepted(llm) > 0.9  # All but those after a request's end.


def test_two_workers_draft_and_verify(tiny_model: Callable[[str], TinyModel]) -> None:
    """The head's passes are one graph, of which each rank has its share, cut at every collective."""
    model = tiny_model("llama")
    config = speculation("head", model) | {"num_speculative_tokens": 2}
    buckets = {"neuron_config": FEW_BUCKETS}
    options: dict[str, Any] = {"max_model_len": 128, "speculative_config": config}
    with engine(model.path, **options, enforce_eager=True) as llm:
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        accepted_alone = share_accepted(llm)
    with engine(model.path, **options, tensor_parallel_size=2, additional_config=buckets) as llm:
        before = llm.collective_rpc(count_of_rank)
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        assert llm.collective_rpc(count_of_rank) == before
        assert abs(share_accepted(llm) - accepted_alone) < 0.02
