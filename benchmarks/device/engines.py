"""Engines of this process, on openxla, that run the same workloads in turns: each has all cores while it runs."""

import gc
import random
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

ENGINE: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "enable_prefix_caching": False}


class Engine:
    """An engine of ``LLM`` with these options."""

    def __init__(self, **options: Any) -> None:
        gc.collect()  # Frees an engine before it that is no longer used.
        self.llm = LLM(**(ENGINE | options))

    def run(self, batch: int, prompt_tokens: int, new_tokens: int, adapters: Sequence[str] = ()) -> None:
        """Random prompts, every one answered with exactly so many greedy tokens.

        ``adapters``: paths of LoRA adapters, which take turns.
        """
        numbers = random.Random(batch)
        vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        prompts = [
            TokensPrompt(prompt_token_ids=[numbers.randrange(vocabulary) for _ in range(prompt_tokens)])
            for _ in range(batch)
        ]
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        requests = [LoRARequest(path, number, path) for number, path in enumerate(adapters, 1)]
        chosen = [requests[index % len(requests)] for index in range(batch)] if requests else None
        self.llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)


def sized(batch: int, length: int, prompt_tokens: int, rows: list[int]) -> dict[str, Any]:
    """Engine options: one size for the prompts, and decode of these ``rows`` up to a ``length``."""
    max_tokens = max(64, batch * prompt_tokens)
    buckets = {
        "num_seqs_buckets": rows,
        "num_batched_tokens_buckets": [max_tokens],
        "context_length_buckets": [length],
        "warm_up": "full",
    }
    return {
        "max_model_len": length,
        "max_num_seqs": batch,
        "max_num_batched_tokens": max_tokens,
        "additional_config": {"neuron_config": buckets},
    }
