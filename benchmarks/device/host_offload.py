"""Prompt tokens a second with cache blocks on the host, against computing the prompts again.

    python -m benchmarks.device.host_offload [--times 3] [--prompt-tokens 512]

A Llama in float32 on openxla (PJRT CPU) with random weights: hidden 1,024, 4 layers (`--layers`), 16 heads of 64 with 4
KV heads. Some prompts together need `--times` the tokens that the cache of an engine holds, and are sent again and
again in the same order, so that no block of theirs is left on the device when a prompt comes back. Engines with
`kv_offloading_size` and without take turns. The first turn, in which nothing is on the host yet, does not count.
"""

import random
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from benchmarks.device.engines import Engine
from benchmarks.harness.models import MIDDLING, saved_llama
from benchmarks.harness.report import make_parser, show, take_turns
from model_runner_base.testing.engine import cache_bytes, metric

PROMPTS = 12
ON_HOST_GIB = 1.0


def send(engine: Engine, prompts: Sequence[list[int]]) -> list[int]:
    """Sends the prompts one after the other; returns the first token after each."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    outputs = [
        engine.llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)[0] for prompt in prompts
    ]
    return [output.outputs[0].token_ids[0] for output in outputs]


def measure(model: str, times: int, length: int, repeats: int) -> dict[str, Any]:
    """Figures of both engines, whose tokens must be equal."""
    numbers = random.Random(0)
    prompts = [[numbers.randrange(MIDDLING["vocab_size"]) for _ in range(length)] for _ in range(PROMPTS)]
    options = {
        "model": model,
        "max_model_len": 2 * length,
        "max_num_seqs": 1,
        "max_num_batched_tokens": length,
        "kv_cache_memory_bytes": cache_bytes(model, PROMPTS * length // times),
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }
    engines = {"computed": Engine(**options), "copied": Engine(**options, kv_offloading_size=ON_HOST_GIB)}
    assert send(engines["computed"], prompts) == send(engines["copied"], prompts)
    turns = take_turns({name: partial(send, engine, prompts) for name, engine in engines.items()}, repeats)
    hits = metric(engines["copied"].llm, "vllm:external_prefix_cache_hits")
    assert send(engines["computed"], prompts) == send(engines["copied"], prompts)
    rates = {f"{name}_tok_s": PROMPTS * length / median(each) * 1e3 for name, each in turns.items()}
    ratio = median(one / other for one, other in zip(turns["computed"], turns["copied"], strict=True))
    return rates | {"ratio": ratio, "hits_a_token": hits / (PROMPTS * length * (1 + repeats))}


def main() -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--times", type=int, default=3, help="tokens of the prompts, by those that the cache holds")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    if args.quick:
        args.prompt_tokens, args.layers, args.repeats = 64, 1, 1
    with saved_llama(num_hidden_layers=args.layers, **MIDDLING) as model:
        show([measure(str(model), args.times, args.prompt_tokens, args.repeats)], args.json)


if __name__ == "__main__":
    main()
