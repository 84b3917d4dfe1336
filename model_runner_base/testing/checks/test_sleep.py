"""Sleep: after it the tokens are the same, and as many drafts are right as before."""

from collections.abc import Callable

import pytest
import torch
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import cache_bytes, generate, greedy, metric, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

PROMPTS = random_prompts(210, [5, 40, 70])
COUNT = 20


@pytest.mark.parametrize("drafts", [None, "same"], ids=["alone", "with drafts"])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep(level: int, drafts: str | None, engine: Callable[..., LLM], text_model: TinyModel) -> None:
    """Engines have the same tokens after sleep, at level 2 with a reload, and accept as many drafts."""
    config = None if drafts is None else speculation(drafts, text_model)
    num_bytes = cache_bytes(text_model.path, 1024)
    options = {"speculative_config": config, "kv_cache_memory_bytes": num_bytes}
    llm = engine(text_model.path, enable_sleep_mode=True, **options)
    before = run(llm, text_model)
    assert drafts is None or before > 0, "no drafts were accepted before sleep"
    weights = weights_of(llm)
    for _ in range(2):
        llm.sleep(level=level)
        if level == 2:  # In the order of vLLM's documentation.
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
        else:
            llm.wake_up()
        is_left = any(cache.cpu().any() for cache in runner_of(llm).parts.kv_caches)
        assert not is_left, "caches come back from sleep with numbers other than zero"
        changed = [name for name, weight in weights_of(llm).items() if not torch.equal(weight, weights[name])]
        after = run(llm, text_model)
        assert not changed, f"{len(changed)} weights come back from sleep at level {level} changed: {changed[0]}"
        assert after == before, f"{after} drafts were accepted after sleep at level {level}, {before} before"


def weights_of(llm: LLM) -> dict[str, torch.Tensor]:
    """Copies of the model's weights on the host, by name."""
    return {name: weight.to("cpu", copy=True) for name, weight in runner_of(llm).get_model().named_parameters()}


def run(llm: LLM, model: TinyModel) -> int:
    """Checks tokens; returns how many drafts were accepted."""
    before = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    llm.reset_prefix_cache()
    check_equal(model, PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(COUNT))), [COUNT] * len(PROMPTS))
    return int(metric(llm, "vllm:spec_decode_num_accepted_tokens") - before)
