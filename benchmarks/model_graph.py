"""The model's graph alone on PJRT CPU: decodes with a chunk of a prompt, a prompt alone, decodes alone.

The Llama of benchmarks.throughput, each step at whichever of the platform's own sizes it is given, or with ``--exact``
at just the size it has; milliseconds from the launch to the end, the steps taking turns.

    python -m benchmarks.model_graph [--repeats 20] [--exact]
"""

import statistics

from benchmarks.bare_steps import Batch, ExactWorker, LazyWorker, model_graph, worker
from benchmarks.padding import DEFAULT
from benchmarks.report import make_parser, show, take_turns
from benchmarks.throughput import ENGINE, MODEL

CONTEXTS = list(range(169, 232))
"""Contexts of 63 decodes: 200 tokens in the mean, anywhere in their KV tiles."""
STEPS = {
    "63 decodes, a chunk of 192": ([*CONTEXTS, 192], 1),
    "a prompt of 256": ([256], 1),
    "64 decodes": ([*CONTEXTS, 200], 0),
}
"""Lengths of the requests, and how many of them, the last, are prompts."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--exact", action="store_true", help="no padding")
    args = parser.parse_args()
    max_num_reqs, max_num_tokens = DEFAULT
    length = ENGINE["max_model_len"]
    limits = {"max_model_len": length, "max_num_seqs": max_num_reqs, "max_num_batched_tokens": max_num_tokens}
    model = MODEL | {"head_dim": MODEL["hidden_size"] // MODEL["num_attention_heads"]}
    worker_cls = ExactWorker if args.exact else LazyWorker
    with worker(worker_cls, max_num_reqs * length, model, **limits) as lazy:
        graphs = {
            name: model_graph(Batch(lazy, lengths, num_prompts=num_prompts))
            for name, (lengths, num_prompts) in STEPS.items()
        }
        times = take_turns({name: graph.run for name, graph in graphs.items()}, args.repeats)
    rows = [
        {
            "step": name,
            "size": str(graph.size),
            "least_ms": min(times[name]),
            "median_ms": statistics.median(times[name]),
        }
        for name, graph in graphs.items()
    ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
