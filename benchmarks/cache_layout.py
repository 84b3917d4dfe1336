"""Decode attention under openxla on a paged and on a contiguous cache, by whole cache lines and tile by tile.

One layer, every case compiled for exactly what it needs, the fastest of its runs: `paged` with blocks of 32, `tiles`
the same plan on a contiguous cache, `lines` the front of every cache line as one slice, in use or not.

    python -m benchmarks.cache_layout
"""

import numpy as np
import torch

from benchmarks.attention import Layer
from benchmarks.report import interleaved, parse, show
from model_runner_base.step.sizes import StepKind
from neuron_runner.allocator import keep_freed_memory

MAX_LENGTH, LINES = 2048, 32

CASES = {
    "32 of 32 lines, 256": [256] * LINES,
    "32 of 32 lines, 1024": [1024] * LINES,
    "32 of 32 lines, 2048": [2048] * LINES,
    "32 of 32 lines, 64..2048": np.linspace(64, 2048, LINES).astype(int).tolist(),
    "8 of 32 lines, 1024": [1024] * 8,
}


def main() -> None:
    args = parse(__doc__)
    keep_freed_memory()  # As the worker does.
    paged, contiguous = Layer(LINES, MAX_LENGTH, 32), Layer(LINES, MAX_LENGTH, MAX_LENGTH)
    rows = []
    with torch.no_grad():
        for name, lengths in CASES.items():
            ways = {
                "paged": paged.decode(lengths),
                "tiles": contiguous.decode(lengths),
                "lines": contiguous.decode(lengths, StepKind.DECODE_CONTIGUOUS),
            }
            times = interleaved({name: graph.run for name, graph in ways.items()}, args.repeats, min)
            rows.append(
                {"rows": name}
                | {f"{way}_ms": ms for way, ms in times.items()}
                | {"lines_to_paged": times["lines"] / times["paged"]}
            )
    show(rows, args.json)


if __name__ == "__main__":
    main()
