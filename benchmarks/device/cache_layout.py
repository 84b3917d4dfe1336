"""Decode under openxla on a paged and on a contiguous cache, by whole cache lines and tile by tile.

A model of one layer with 16 heads of 64, 4 KV heads, and little else; every case is compiled for exactly what it needs.
Milliseconds of the model's graph, the fastest of its runs: `paged` with blocks of 32, `tiles` the same plan on a
contiguous cache, `lines` the front of every cache line as one slice, in use or not.

    python -m benchmarks.device.cache_layout
"""

from typing import Any

import numpy as np

from benchmarks.harness.batch import Batch, least, model_graph
from benchmarks.harness.report import make_parser, progress, show
from benchmarks.harness.workers import ExactWorker, worker
from model_runner_base import StepKind

MAX_LENGTH, LINES = 2048, 32
MODEL = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": MAX_LENGTH,
}
LIMITS: dict[str, Any] = {
    "max_model_len": MAX_LENGTH,
    "max_num_seqs": LINES,
    "max_num_batched_tokens": MAX_LENGTH,
    "additional_config": {"attention_memory_gib": 0.5},  # Lines are read to lengths whose pairs fit it.
}
CASES = {
    "32 of 32 lines, 256": [256] * LINES,
    "32 of 32 lines, 1024": [1024] * LINES,
    "32 of 32 lines, 2048": [2048] * LINES,
    "32 of 32 lines, 64..2048": np.linspace(64, 2048, LINES).astype(int).tolist(),
    "8 of 32 lines, 1024": [1024] * 8,
}


def measure(paged: Any, contiguous: Any, lengths: list[int], repeats: int) -> dict[str, float]:
    """Milliseconds of each way, by turns, and lines relative to paged."""
    ways = {"paged": model_graph(Batch(paged, lengths))}
    for way, kind in (("tiles", StepKind.DECODE), ("lines", StepKind.DECODE_CONTIGUOUS)):
        contiguous.model_runner.graph_policy.kind = kind
        ways[way] = model_graph(Batch(contiguous, lengths))
        assert ways[way].size.kind == kind, f"{way} are not offered"
    times = least(ways, repeats)
    return {f"{way}_ms": ms for way, ms in times.items()} | {"lines_to_paged": times["lines"] / times["paged"]}


def main() -> None:
    args = make_parser(__doc__, repeats=7).parse_args()
    cases, repeats = (dict(list(CASES.items())[-1:]), 1) if args.quick else (CASES, args.repeats)
    with (
        worker(ExactWorker, LINES * MAX_LENGTH, MODEL, **LIMITS) as paged,
        worker(ExactWorker, LINES * MAX_LENGTH, MODEL, MAX_LENGTH, **LIMITS) as contiguous,
    ):
        rows = [
            {"rows": name, **measure(paged, contiguous, lengths, repeats)}
            for name, lengths in progress(cases.items(), "cases", total=len(cases))
        ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
