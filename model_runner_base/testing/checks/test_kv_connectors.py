"""KV connectors: the tokens are the same where cache blocks are loaded, fail to load, or come back from the host."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.kept_blocks import KeptBlocks, transfer_config
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

PROMPTS = random_prompts(220, [5, 120, 200, 33])
COUNT = 9


@pytest.mark.parametrize("num_failing", [0, 3], ids=["all blocks", "some fail"])
@pytest.mark.parametrize("between_steps", [False, True], ids=["inside steps", "between steps"])
def test_loaded_blocks(
    between_steps: bool, num_failing: int, text_engine: Callable[..., LLM], text_model: TinyModel
) -> None:
    """Prompts whose blocks a KV connector loads have the same tokens; what it fails to load is computed."""
    KeptBlocks.forget()
    llm = text_engine(
        kv_transfer_config=transfer_config(),
        kv_cache_memory_bytes=cache_bytes(text_model.path, 1024),
        async_scheduling=False,
    )
    KeptBlocks.between_steps = between_steps
    warm = runner_of(llm).graph_policy.num_compilations()
    check(llm, text_model, "blocks are saved")
    KeptBlocks.num_failing = num_failing
    check(llm, text_model, "blocks are loaded")
    num_loaded, num_failed = KeptBlocks.calls["loaded"], KeptBlocks.calls["failed"]
    assert num_loaded > 3 and num_failed == num_failing, f"{num_loaded} blocks were loaded, and {num_failed} failed"
    check(llm, text_model, "blocks are loaded again")
    assert runner_of(llm).graph_policy.num_compilations() == warm, "loads or saves of blocks compiled something"


def test_blocks_on_the_host(text_engine: Callable[..., LLM], text_model: TinyModel) -> None:
    """Prompts whose blocks come back from the host's memory have the same tokens."""
    llm = text_engine(kv_offloading_size=0.01, kv_cache_memory_bytes=cache_bytes(text_model.path, 1024))
    warm = runner_of(llm).graph_policy.num_compilations()
    for _ in range(3):
        check(llm, text_model, "blocks are kept on the host")
        generate(llm, PROMPTS[:1], greedy(1))  # Stores begin with the next step.
    num_loaded = metric(llm, "vllm:external_prefix_cache_hits")
    assert num_loaded > 100, f"{num_loaded:.0f} tokens were loaded from the host"
    assert runner_of(llm).graph_policy.num_compilations() == warm, "loads or stores of blocks compiled something"


def check(llm: LLM, model: TinyModel, where: str) -> None:
    """Compares tokens with the reference's; no block is on the device before."""
    assert llm.reset_prefix_cache()
    tokens = tokens_of(generate(llm, PROMPTS, greedy(COUNT)))
    check_equal(model, PROMPTS, tokens, [COUNT] * len(PROMPTS), where=where)
