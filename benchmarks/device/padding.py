"""Share of padding in a server's work: the real scheduler's steps under random traffic, on the default sizes.

    python -m benchmarks.device.padding [--plot FILE]

`grid` is lists of powers of two, `default` the sizes that the platform places. `CPU` weighs rows and pairs as measured,
`FLOPs` by the arithmetic of Llama 3 8B. The figure shows padding over the number of graphs, by ``max_padding``.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.device.traffic import CHAT, CHUNK, DECODE, RETRIEVAL, Mix, needs_of, step_limits
from benchmarks.harness.report import make_parser, progress, show
from model_runner_base.step.sizes import StepLimits, StepSize, geometric
from neuron_runner.config import NeuronConfig
from neuron_runner.graph_policy import OpenXlaPolicy

LOADS = (0.3, 0.6, 0.9)
NUM_STEPS = 2000
DEFAULT = (64, 512)
"""Requests and tokens of a step, as the platform sets them where the user does not."""


@dataclass(frozen=True)
class Weights:
    """Costs of a step's parts, in units of one token's linear layers."""

    row: float
    decode_pair: float
    chunk_pair: float


CPU = Weights(row=0.2, decode_pair=0.75, chunk_pair=2.5)
"""Weights of the bundled model on PJRT CPU: pairs as ``benchmarks.device.growth`` fits them, a row by arithmetic."""
_TOKEN = 2 * 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
_KEY = 4 * 32 * 4096
FLOPS = Weights(
    row=2 * 4096 * 128256 / _TOKEN,
    decode_pair=DECODE.query * DECODE.keys * _KEY / _TOKEN,
    chunk_pair=CHUNK.query * CHUNK.keys * _KEY / _TOKEN,
)
"""Weights of Llama 3 8B, by arithmetic."""
PARTS = ("tokens", "rows", "decode pairs", "chunk pairs")


PADDINGS = (0.4, 0.3, 0.2, 0.15, 0.12, 0.1, 0.08)
"""Values of ``max_padding``, which trades padding for graphs."""


def grid(limits: StepLimits) -> NeuronConfig:
    """Lists that grow twofold: what the bucket lists would hold without knowledge of traffic."""
    return NeuronConfig(
        num_seqs_buckets=geometric(1, limits.max_num_reqs),
        context_length_buckets=[tiles * limits.decode.keys for tiles in geometric(1, limits.max_kv_tiles)],
        num_batched_tokens_buckets=geometric(32, limits.max_num_tokens),
    )


def padding(limits: StepLimits, policy: OpenXlaPolicy, traces: list[Counter[StepSize]]) -> dict[str, float]:
    """Per cent of each kind of work, and of all of it, that is padding. The neutral pairs of a step count as such."""
    needed, paid = np.zeros(len(PARTS)), np.zeros(len(PARTS))
    for one in traces:
        for need, count in one.items():
            needed += count * work(limits, need, neutral=0)
            paid += count * work(limits, policy.dispatch(need))
    weights = np.array([(1, *vars(each).values()) for each in (CPU, FLOPS)])
    waste = 100 * (1 - np.append(needed, weights @ needed) / np.append(paid, weights @ paid))
    return dict(zip((*PARTS, "all, CPU", "all, FLOPs"), waste.tolist(), strict=True))


def work(limits: StepLimits, size: StepSize, neutral: int = 1) -> np.ndarray:
    """Amounts of PARTS in a step of a size; ``neutral`` pairs of each plan are counted."""
    dims = limits.named(size)
    pairs = [max(0, dims[name] - 1 + neutral) for name in ("decode_pairs", "chunk_pairs")]
    return np.array([size.num_tokens, size.num_reqs, *pairs])


Case = tuple[int, int, int, Mix]
CASES: list[Case] = [
    (*DEFAULT, 512, CHAT),
    (*DEFAULT, 2048, CHAT),
    (*DEFAULT, 2048, RETRIEVAL),
    (16, 512, 1024, CHAT),
    (256, 8192, 2048, CHAT),
]
"""Requests, tokens and model length, and traffic."""
TRADED = CASES[:2]
"""Cases in which padding is traded for graphs, too."""


def measure(case: Case, trades: bool, num_steps: int) -> Iterator[dict[str, Any]]:
    """Padding of several lists of sizes, on traces that differ from those that sizes are placed by."""
    *numbers, mix = case
    limits = step_limits(*numbers)
    traces = [needs_of(limits, mix, load, num_steps) for load in LOADS]
    configs = {"grid": grid(limits), "default": NeuronConfig()}
    configs |= {f"max_padding={value}": NeuronConfig(max_padding=value) for value in PADDINGS if trades}
    for name, config in configs.items():
        policy = OpenXlaPolicy(config)
        policy.configure(limits)
        yield {
            "limits": f"{limits.max_num_reqs} requests, {limits.max_num_tokens} tokens, length {limits.max_model_len}",
            "traffic": mix.name,
            "sizes": name,
            "graphs": len(policy.sizes),
            **{part: round(value, 1) for part, value in padding(limits, policy, traces).items()},
        }


def main() -> None:
    args = make_parser(__doc__, has_plot=True).parse_args()
    cases, num_steps = (CASES[:1], 200) if args.quick else (CASES, NUM_STEPS)
    rows = [
        row
        for case in progress(cases, "traffic")
        for row in measure(case, case in TRADED and not args.quick, num_steps)
    ]
    show(rows, args.json)
    if args.plot:
        from benchmarks.harness.plots import draw_lines

        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["sizes"].startswith("max_padding"):
                lines.setdefault(row["limits"], {})[row["graphs"]] = row["all, CPU"]
        draw_lines(args.plot, lines, "graphs", "% of the work that is padding", line=15)


if __name__ == "__main__":
    main()
