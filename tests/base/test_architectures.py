"""Architectures of the tiny configurations: greedy tokens equal those of HF transformers in float32."""

from collections.abc import Callable

import pytest
from conftest import engine
from vllm.v1.kv_cache_interface import FullAttentionSpec

from model_runner_base.testing.architectures import CONFIGS, REFUSED
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of, generate, greedy, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import logits_after

PROMPTS = random_prompts(0, [5, 33, 90, 150])
NEW_TOKENS = 12
FEW_BUCKETS = {
    "neuron_config": {
        "num_batched_tokens_buckets": [64],
        "num_seqs_buckets": [4],
        "context_length_buckets": [256],
    }
}
COMPILED = ["qwen2-moe", "bloom", "gpt-oss", "llama4"]
COMPILED += [pytest.param(name, marks=pytest.mark.full) for name in ("mixtral", "gemma3", "phi", "cohere2")]
"""Experts of two kinds, several cache groups, ALiBi, parallel blocks, a shifted layer norm, sinks, chunks."""

Tiny = Callable[[str], TinyModel]


def check(model: TinyModel, prompts: list[tuple[int, ...]], tokens: list[list[int]]) -> None:
    """Checks that each token is the reference's choice after those before it; hence all are its greedy continuation."""
    assert len({token for row in tokens for token in row}) > 10, "the tokens are not diverse"
    for prompt, got in zip(prompts, tokens, strict=True):
        want = logits_after(model, (*prompt, *got[:-1])).argmax(axis=-1)[len(prompt) - 1 :]
        assert got == want.tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str, tiny_model: Tiny) -> None:
    """Tokens are the reference's for prompts in parts and mixed batches, longer than windows and than several
    chunks."""
    model = tiny_model(name)
    with engine(model.path, max_model_len=256, enforce_eager=True) as llm:
        check(model, PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS))))


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_transformers(name: str, tiny_model: Tiny) -> None:
    model = tiny_model(name)
    with engine(model.path, max_model_len=256, additional_config=FEW_BUCKETS) as llm:
        check(model, PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS))))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_first_request(name: str, tiny_model: Tiny) -> None:
    """A model that cannot be served is refused by its config, or else by the first layer that is not supported."""
    model = tiny_model(name)
    with (
        pytest.raises((ValueError, NotImplementedError), match="is not supported"),
        engine(model.path, enforce_eager=True),
    ):
        pass


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "cohere2", "gpt-oss", "llama4"])
def test_layers_that_see_part_have_block_tables_of_their_own(name: str, tiny_model: Tiny) -> None:
    """Layers that see a part of the context give back the blocks before it: 190 tokens fit where full attention alone
    would take every block."""
    model = tiny_model(name)
    prompt, count = random_prompts(1, [150])[0], 40
    with engine(model.path, max_model_len=256, enforce_eager=True, block_size=16, async_scheduling=False) as llm:
        core, scheduler = llm.llm_engine, core_of(llm).scheduler
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        is_full = [isinstance(spec, FullAttentionSpec) for spec in specs]
        assert any(is_full) and not all(is_full)
        core.add_request("0", {"prompt_token_ids": list(prompt)}, greedy(count))
        tokens: list[int] = []
        held = []
        while core.has_unfinished_requests():
            for output in core.step():
                tokens = output.outputs[0].token_ids
            for request in scheduler.running:
                blocks = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
                held.append([sum(not block.is_null for block in group) for group in blocks])
        check(model, [prompt], [list(tokens)])
    for keeps_all, counts in zip(is_full, held[-1], strict=True):
        # 189 tokens in the cache at the end; a window of 40 spans at most 4 blocks of 16, and one is being filled.
        assert counts == 12 if keeps_all else counts <= 4


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_layers_that_see_part_share_a_block_table_with_others(name: str, tiny_model: Tiny) -> None:
    """A shared block table serves when the scheduler is told to keep all blocks of all layers."""
    model = tiny_model(name)
    with engine(model.path, max_model_len=256, enforce_eager=True, disable_hybrid_kv_cache_manager=True) as llm:
        (group,) = core_of(llm).scheduler.kv_cache_config.kv_cache_groups
        assert isinstance(group.kv_cache_spec, FullAttentionSpec)
        check(model, PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS))))
