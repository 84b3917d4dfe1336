"""Recurrent layers over two ranks of tensor parallelism: tokens of HF transformers, and a rank's part of the states.

Two processes run the engines of all models in turn, each its own rank of them.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import compilations, engine
from lane import HAS_OPENXLA
from test_recurrent_speculation import multi_token_prediction
from torch.multiprocessing.spawn import spawn
from vllm.utils.network_utils import get_open_port

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel, make_checkpoint

Tiny = Callable[[str], TinyModel]
PROMPTS = random_prompts(99, [1, 2, 5, 33, 90, 130])
LONGER = [(*prompt, 7, 8, 9) for prompt in PROMPTS]
"""Prompts with prefixes in common with those before; the whole blocks of 16 tokens before their last token are hit."""
NEW_TOKENS = 16
EAGER: dict[str, Any] = {"enforce_eager": True}
KEPT = EAGER | {"enable_prefix_caching": True, "block_size": 16}
DRAFTED: dict[str, Any] = KEPT | {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    if HAS_OPENXLA
    else {"method": "mtp", "num_speculative_tokens": 2}
}
FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [256]}
COMPILED: dict[str, Any] = {"additional_config": {"neuron_config": FEW_BUCKETS}}


DRAFTING = "drafting"
"""Qwen3.5 with a layer that drafts."""


class Case(NamedTuple):
    """A model, how it runs, and the shapes of a request's state in a rank's first recurrent layer."""

    name: str
    options: dict[str, Any]
    states: list[tuple[int, ...]]

    def __str__(self) -> str:
        kind = "eager" if self.options == EAGER else "compiled"
        kind = "drafted" if self.options == DRAFTED else "kept" if self.options == KEPT else kind
        return f"{self.name}-{kind}"


# 96 channels of 2 key heads and 4 value heads; 4 heads and one group of 256 numbers on each rank; 64 and 128 channels.
_DELTA_NET = [(3, 48), (2, 16, 8)]
CASES = (
    [
        Case("lfm2", EAGER, [(2, 32)]),
        Case("jamba", EAGER, [(3, 64), (64, 8)]),
        Case("falcon-h1", EAGER, [(3, 32 + 2 * 256), (2, 16, 256)]),
        Case("qwen3-next", COMPILED, _DELTA_NET),
        Case("falcon-h1", KEPT, [(3, 32 + 2 * 256), (2, 16, 256)]),
        Case("lfm2", DRAFTED, [(2, 32)]),
    ]
    if HAS_OPENXLA
    else [
        Case("qwen3_5", KEPT, _DELTA_NET),
        Case("nemotron-h", EAGER, [(3, 64 + 2 * 16), (4, 16, 16)]),
        Case(DRAFTING, DRAFTED, _DELTA_NET),
    ]
)


def serve_rank(rank: int, ports: Sequence[int], directory: Path) -> None:
    """Answers all prompts in an engine of each model, as one of its two ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    for case, port in zip(CASES, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with engine(directory / case.name, **options, **case.options, max_model_len=256) as llm:
            before = compilations() if case.options == COMPILED else None
            tokens = tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS)))
            assert before is None or compilations() == before
            again = generate(llm, LONGER, greedy(NEW_TOKENS)) if "block_size" in case.options else []
            hits = [output.num_cached_tokens for output in again]
            drafts = [metric(llm, f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")]
            answers = tokens, shapes_of(runner_of(llm)), tokens_of(again), hits, drafts
            torch.save(answers, directory / f"{case}-{rank}")


def shapes_of(runner: Any) -> list[tuple[int, ...]]:
    """Shapes of a request's state in the first recurrent layer."""
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    layer = next(layer for layer in layers if hasattr(layer, "get_state_shape"))
    (cache,) = layer.kv_cache if isinstance(layer.kv_cache, list) else (layer.kv_cache,)
    return [tuple(state.shape[1:]) for state in ([cache] if isinstance(cache, torch.Tensor) else cache)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models and of what each rank answered."""
    directory = tmp_path_factory.mktemp("ranks")
    for case in CASES:
        if case.name == DRAFTING:
            multi_token_prediction(make_checkpoint("qwen3_5", directory), directory / DRAFTING)
        else:
            make_checkpoint(case.name, directory)
    spawn(serve_rank, ([get_open_port() for _ in CASES], directory), nprocs=2)
    return directory


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks(case: Case, served: Path) -> None:
    """Tokens are the reference's, also of prompts that begin with states that earlier ones have left on each rank.

    Wrong drafts do not change them.
    """
    model = TinyModel(served / case.name)
    for rank in range(2):
        tokens, states, again, hits, (drafted, accepted) = torch.load(served / f"{case}-{rank}")
        check_equal(model, PROMPTS, tokens, [NEW_TOKENS] * len(PROMPTS))
        assert states == case.states
        if case.options == DRAFTED:
            assert drafted > accepted, "no draft was wrong"
        if "block_size" in case.options:
            check_equal(model, LONGER, again, [NEW_TOKENS] * len(LONGER))
            assert hits == [0, 0, 0, 32, 80, 128]


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("qwen3-next", 4, "linear_num_key_heads=2 are not cut over 4 ranks: use a"),
        ("zamba2", 4, "mamba_ngroups=2 are not cut over 4 ranks"),
        ("mamba2", 3, "num_heads=8 are not cut over 3 ranks"),
    ],
)
def test_what_ranks_cannot_share_is_refused(name: str, ranks: int, words: str, tiny_model: Tiny) -> None:
    with pytest.raises(ValueError, match=words), engine(tiny_model(name).path, **EAGER, tensor_parallel_size=ranks):
        pass
