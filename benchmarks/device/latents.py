"""Decode with latents, which are one row a token, against keys and values of all heads (``VLLM_MLA_DISABLE=1``).

Two layers with attention of DeepSeek V2 Lite's sizes and little else, in float32 with random weights, as plain torch on
the CPU. Milliseconds of a step, the fastest, by turns.

    python -m benchmarks.device.latents
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness.batch import Batch
from benchmarks.harness.fake_device import FakeDevice
from benchmarks.harness.report import make_parser, progress, show, take_turns
from benchmarks.harness.runners import Lane, Side
from benchmarks.harness.workers import EagerWorker, worker

MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "dtype": "float32",
}
CASES = [(1, 2000), (8, 2000), (1, 8100), (4, 8100)]  # Requests, and tokens of each.


@contextmanager
def saved_config(max_length: int) -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": max_length}))
        yield Path(directory)


def decode(side: Any, batch: int, length: int) -> Callable[[], object]:
    """A step of requests that are in the cache already; the first call admits them."""
    return Lane(Side(side, FakeDevice()), Batch(side, [length] * batch, headroom=64)).step


def main() -> None:
    args = make_parser(__doc__, repeats=7).parse_args()
    cases, repeats = (CASES[:1], 1) if args.quick else (CASES, args.repeats)
    tokens = max(batch * (length + 64) for batch, length in cases)
    longest = max(length for _, length in cases) + 64
    options = {"max_model_len": longest, "max_num_seqs": 8, "max_num_batched_tokens": longest}
    sides, rows = dict[str, Any](), list[dict[str, Any]]()
    with ExitStack() as stack, torch.no_grad():
        model = stack.enter_context(saved_config(longest))
        for name, is_disabled in (("latents", "0"), ("heads", "1")):
            os.environ["VLLM_MLA_DISABLE"] = is_disabled
            sides[name] = stack.enter_context(worker(EagerWorker, 2 * tokens, {}, model=model, **options))
        for batch, length in progress(cases, "cases"):
            steps = {name: decode(side, batch, length) for name, side in sides.items()}
            times = {name: min(each) for name, each in take_turns(steps, repeats).items()}
            rows.append({"requests": batch, "tokens": length, **{f"{name}_ms": ms for name, ms in times.items()}})
            rows[-1]["latents_to_heads"] = times["latents"] / times["heads"]
    show(rows, args.json)


if __name__ == "__main__":
    main()
