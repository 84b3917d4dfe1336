"""Prompts of tokens and embeddings mixed, which later releases of vLLM have."""

from collections.abc import Callable

import numpy as np
import torch
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_prompt_embeddings import NEW_TOKENS, check, embeddings, options_of
from model_runner_base.testing.engine import check_hit, check_preempted, metric
from model_runner_base.testing.models import TinyModel


def test_mixed_prompts(engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> None:
    """Prompts with embeddings between tokens: in chunks, with a cached prefix, preempted and resumed."""
    model = tiny_model("llama")
    llm = engine(model.path, **options_of(model))
    rng = np.random.default_rng(5)
    prompts = random_prompts(74, [5, 33, 64, 70, 80, 90])
    asked = []
    for prompt in prompts:
        is_token = rng.random(len(prompt)) < 0.5
        is_token[:2] = True, False
        asked.append(
            {
                "prompt_embeds": embeddings(model, prompt).masked_fill(torch.from_numpy(is_token).unsqueeze(1), 0.0),
                "prompt_token_ids": np.where(is_token, prompt, 0).tolist(),
                "prompt_is_token_ids": is_token.tolist(),
            }
        )
    preemptions = metric(llm, "vllm:num_preemptions")
    check(llm, model, asked, prompts, 60)
    hits = metric(llm, "vllm:prefix_cache_hits")
    check(llm, model, asked[::-1], prompts[::-1], NEW_TOKENS)
    check_preempted(llm, preemptions)
    check_hit(metric(llm, "vllm:prefix_cache_hits") > hits)
