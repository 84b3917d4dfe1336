"""Engines at the smallest limits that vLLM accepts start, warm up their host loops within bounds, and serve."""

import os
import subprocess
import sys

import pytest
from conftest import BUNDLED_MODEL

from model_runner_base.testing.models import TinyModel

LIMITS = [(16, 16, 1, 16), (18, 16, 1, 1), (2, 16, 1, 2), (200, 256, 2, 64)]
"""Model length, block size, requests, and tokens a step."""

SERVE = """
import sys
from vllm import LLM, SamplingParams
from model_runner_base.testing.engine import shut_down

for max_model_len, block_size, num_reqs, num_tokens in eval(sys.argv[2]):
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=max_model_len, block_size=block_size,
              max_num_seqs=num_reqs, max_num_batched_tokens=num_tokens, enable_chunked_prefill=True,
              kv_cache_memory_bytes=1 << 22)
    params = SamplingParams(temperature=0, max_tokens=max_model_len, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5]}], params, use_tqdm=False)
    print("RESULT", max_model_len, list(output.outputs[0].token_ids), flush=True)
    del llm
    shut_down()
"""


@pytest.mark.parametrize("loops", ["compiled", "plain"])
def test_starts_and_serves_to_the_end(loops: str) -> None:
    """An engine starts and serves with compiled loops, and with plain ones, which raise where they leave an array."""
    out = subprocess.run(
        [sys.executable, "-c", SERVE, BUNDLED_MODEL, str(LIMITS)],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1" if loops == "plain" else "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stdout + out.stderr[-3000:]
    tokens = TinyModel(BUNDLED_MODEL).greedy((5,), max(length for length, *_ in LIMITS))
    for length, *_ in LIMITS:
        assert f"RESULT {length} {tokens[: length - 1]}\n" in out.stdout
