"""Share of padding in a server's work: the real scheduler's steps under random traffic, on the default sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.report import make_parser, show
from benchmarks.traffic import CHAT, CHUNK, DECODE, RETRIEVAL, Mix, Trace, step_limits, trace
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
"""Weights of the bundled model on PJRT CPU: pairs as `python -m benchmarks.growth` fits them, a row by arithmetic."""
_TOKEN = 2 * 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
_KEY = 4 * 32 * 4096
FLOPS = Weights(
    row=2 * 4096 * 128256 / _TOKEN,
    decode_pair=DECODE.query * DECODE.keys * _KEY / _TOKEN,
    chunk_pair=CHUNK.query * CHUNK.keys * _KEY / _TOKEN,
)
"""Weights of Llama 3 8B, by arithmetic."""
PARTS = ("tokens", "rows", "decode pairs", "chunk pairs")


def placed(limits: StepLimits, max_padding: float | None = None) -> OpenXlaPolicy:
    """The default sizes."""
    policy = OpenXlaPolicy(NeuronConfig() if max_padding is None else NeuronConfig(max_padding=max_padding))
    policy.configure(limits)
    return policy


def grid(limits: StepLimits) -> OpenXlaPolicy:
    """Lists that grow twofold: what the bucket lists would hold without knowledge of traffic."""
    config = NeuronConfig(
        num_seqs_buckets=geometric(1, limits.max_num_reqs),
        context_length_buckets=[tiles * limits.decode.keys for tiles in geometric(1, limits.max_kv_tiles)],
        num_batched_tokens_buckets=geometric(32, limits.max_num_tokens),
    )
    policy = OpenXlaPolicy(config)
    policy.configure(limits)
    return policy


def padding(limits: StepLimits, policy: OpenXlaPolicy, traces: list[Trace]) -> dict[str, float]:
    """Per cent of each kind of work, and of all of it, that is padding. The neutral pairs of a step count as such."""
    needed, paid = np.zeros(len(PARTS)), np.zeros(len(PARTS))
    for one in traces:
        for need, count in one.needs.items():
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


def line(limits: StepLimits, mix: Mix, sizes: str, policy: OpenXlaPolicy, traces: list[Trace]) -> dict[str, object]:
    in_tiles = 100 * (1 - sum(t.attended for t in traces) / sum(t.in_pairs for t in traces))
    where = f"{limits.max_num_reqs} requests, {limits.max_num_tokens} tokens, length {limits.max_model_len}"
    return {
        "limits": where,
        "traffic": mix.name,
        "sizes": sizes,
        "graphs": len(policy.sizes),
        **{name: round(value, 1) for name, value in padding(limits, policy, traces).items()},
        "in tiles": round(in_tiles, 1),
    }


def compare(cases: list[tuple[int, int, int, Mix]], num_steps: int = NUM_STEPS) -> Iterator[dict[str, object]]:
    """Padding of the grid and of the default sizes, on traces that differ from those the sizes were placed by."""
    for max_num_reqs, max_num_tokens, max_model_len, mix in cases:
        limits = step_limits(max_num_reqs, max_num_tokens, max_model_len)
        traces = [trace(limits, mix, load, num_steps) for load in LOADS]
        yield line(limits, mix, "grid", grid(limits), traces)
        yield line(limits, mix, "default", placed(limits), traces)


def trade(max_model_len: int, num_steps: int = NUM_STEPS) -> Iterator[dict[str, object]]:
    """Padding against the number of graphs, for the platform's limits."""
    limits = step_limits(*DEFAULT, max_model_len)
    traces = [trace(limits, CHAT, load, num_steps) for load in LOADS]
    for max_padding in (0.4, 0.3, 0.2, 0.15, 0.12, 0.1, 0.08):
        policy = placed(limits, max_padding)
        yield line(limits, CHAT, f"max_padding={max_padding}", policy, traces)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--plots", type=Path, help="write the figure into this directory")
    args = parser.parse_args()
    cases = [
        (*DEFAULT, 512, CHAT),
        (*DEFAULT, 2048, CHAT),
        (*DEFAULT, 2048, RETRIEVAL),
        (16, 512, 1024, CHAT),
        (256, 8192, 2048, CHAT),
    ]
    trades = {f"model length {length}": list(trade(length)) for length in (512, 2048)}
    show([*compare(cases), *chain.from_iterable(trades.values())], args.json)
    if args.plots:
        from benchmarks.plots import draw_trade

        draw_trade(trades, args.plots)


if __name__ == "__main__":
    main()
