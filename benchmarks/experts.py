"""A mixture-of-experts layer under openxla against the experts that are chosen.

Each line is one layer on so many tokens, each choosing 2 experts of so many. `every_ms` is what computing every expert
for every token costs, `ratio` its share that the layer takes. Where few experts can be chosen, the time follows the
choices and not the experts; where tokens are many, it follows tokens x 2 and not tokens x experts.

    python -m benchmarks.experts
"""

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from benchmarks.report import interleaved, parse, show
from model_runner_base.layers.fused_moe import Experts, _every_expert, run_experts

HIDDEN, INNER, TOP_K = 512, 512, 2
CASES = [(1, 8), (1, 32), (1, 128), (4, 128), (16, 16), (64, 16), (256, 16), (256, 64), (1024, 16), (1024, 64)]
"""(tokens, experts)"""


def compiled(way: object, tokens: int, num_experts: int) -> object:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch_xla.device())

    experts = Experts(random(num_experts, HIDDEN, 2 * INNER), random(num_experts, INNER, HIDDEN), "silu")
    hidden, weights = random(tokens, HIDDEN), random(tokens, TOP_K)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:TOP_K] for _ in range(tokens)])
    ids = ids.to(torch_xla.device())
    torch_xla.sync()

    def run() -> None:
        # The result must be held until it is there: a lazy tensor that is dropped is never computed.
        out = way(experts, hidden, ids, weights)  # type: ignore[operator]
        torch_xla.sync()
        xm.wait_device_ops()
        del out

    return run


def main() -> None:
    arguments = parse(__doc__)
    rows = []
    for tokens, num_experts in CASES:
        ways = {
            "layer": compiled(run_experts, tokens, num_experts),
            "every": compiled(_every_expert, tokens, num_experts),
        }
        times = interleaved(ways, arguments.repeats)  # type: ignore[arg-type]
        rows.append(
            {
                "tokens": tokens,
                "experts": num_experts,
                "choices": tokens * TOP_K,
                "layer_ms": times["layer"],
                "every_ms": times["every"],
                "ratio": times["layer"] / times["every"],
            }
        )
    show(rows, arguments.json)


if __name__ == "__main__":
    main()
