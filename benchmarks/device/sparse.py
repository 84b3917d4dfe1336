"""Decode by what an indexer chooses, against the same model that sees all keys, over the context.

Layers with attention of released sizes but for fewer heads, and little else, in float32 with random weights, as plain
torch on the CPU. Milliseconds of processor time of a step, the least, by turns: the whole step, and in it the choice
(an indexer's scores, and the best of them), attention, and the rest.

    python -m benchmarks.device.sparse [--plot docs/plots/sparse.svg]

MiniMax M3 and DeepSeek V4 need vLLM 0.33.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm import ModelRegistry

from benchmarks.harness.batch import Batch
from benchmarks.harness.fake_device import FakeDevice
from benchmarks.harness.report import make_parser, progress, show, steps_in_turns
from benchmarks.harness.runners import Lane, Side
from benchmarks.harness.workers import EagerWorker, worker

CONTEXTS = (2000, 4000, 8000, 16000, 32000)
NUM_REQUESTS = 2
HEADROOM = 64
BLOCK_SIZE = 128
SPARE = 4
"""Blocks for each one that the requests have in one group: vLLM plans further groups of DeepSeek V4."""
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}
DEEPSEEK_V32: dict[str, Any] = SMALL | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
OF_M3: dict[str, Any] = {
    "use_sparse_attention": True,
    "sparse_index_dim": 128,
    "sparse_num_index_heads": 4,
    "sparse_topk_blocks": 16,
    "sparse_block_size": 128,
    "sparse_local_block": 1,
    "sparse_attention_freq": [1, 1],
}
MINIMAX_M3: dict[str, Any] = SMALL | {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "intermediate_size": 128,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "rope_theta": 5e6,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_layer_freq": [0, 0],
    "sparse_attention_config": OF_M3,
}
DEEPSEEK_V4: dict[str, Any] = SMALL | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "q_lora_rank": 512,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["moe", "moe"],
    "num_hash_layers": 0,
    "topk_method": "noaux_tc",
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "hc_sinkhorn_iters": 4,
}
ALL = 1 << 17
"""Number of keys, or more than their blocks, of which all are chosen."""
Config = dict[str, Any]


def _m3(text: Config) -> Config:
    return {"model_type": "minimax_m3_vl", "architectures": text["architectures"], "text_config": text}


FAMILIES: dict[str, tuple[Config, Config]] = {
    "DeepSeek V3.2": (DEEPSEEK_V32, DEEPSEEK_V32 | {"index_topk": ALL}),
    "MiniMax M3": (
        _m3(MINIMAX_M3),
        _m3(MINIMAX_M3 | {"sparse_attention_config": OF_M3 | {"sparse_topk_blocks": ALL}}),
    ),
    "DeepSeek V4": (DEEPSEEK_V4, DEEPSEEK_V4 | {"index_topk": ALL}),
}
"""Configs of each family: as released, and so that a token sees all keys."""


@contextmanager
def saved(config: Config, max_length: int) -> Iterator[Path]:
    longest = {"max_position_embeddings": max_length}
    changed = config | longest
    if "text_config" in config:
        changed["text_config"] = config["text_config"] | longest
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(changed))
        yield Path(directory)


@dataclass
class Parts:
    """Processor time of the parts of one step, in milliseconds."""

    times: dict[str, float] = field(default_factory=dict)

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Has a method of ``owner`` count for ``part``."""
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            self.times[part] = self.times.get(part, 0.0) + (time.process_time() - start) * 1e3
            return result

        object.__setattr__(owner, name, watched)  # Some choosers are frozen.

    def watch_model(self, model: torch.nn.Module) -> None:
        """Watches choice and attention of all layers."""
        for module in model.modules():
            impl = module.__dict__.get("window_impl")
            if impl is not None:
                self.watch(impl, "attend_both", "attention")
            elif hasattr(module.__dict__.get("impl"), "forward"):
                self.watch(module.impl, "forward", "attention")
            for owner in (module, module.__dict__.get("impl")):
                chooser = getattr(owner, "chooser", None)
                if chooser is not None:
                    self.watch(chooser, "choose", "choice")

    def step(self, run: Callable[[], object]) -> dict[str, float]:
        """Times of a step and its parts."""
        self.times = {"choice": 0.0, "attention": 0.0}
        start = time.process_time()
        run()
        whole = (time.process_time() - start) * 1e3
        return {"step": whole, **self.times, "rest": whole - sum(self.times.values())}


def measure(
    configs: Mapping[str, Config], contexts: Sequence[int], repeats: int
) -> dict[str, dict[int, dict[str, float]]]:
    """Least times of a decode step and its parts, by side and context."""
    longest = max(contexts) + HEADROOM
    longest += -longest % BLOCK_SIZE
    options: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": 64}
    # Nothing is compiled; without torch_xla the platform asks for a backend by name.
    options |= {"enforce_eager": True, "additional_config": {"neuron_config": {"compile_backend": "aot_eager"}}}
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in configs}
    with ExitStack() as stack, torch.no_grad():
        sides = dict[str, tuple[Any, Parts]]()
        for name, config in configs.items():
            model = stack.enter_context(saved(config, longest))
            made = stack.enter_context(
                worker(EagerWorker, SPARE * NUM_REQUESTS * longest, {}, block_size=BLOCK_SIZE, model=model, **options)
            )
            parts = Parts()
            parts.watch_model(made.model_runner.model)  # type: ignore[attr-defined]
            sides[name] = made, parts
        for context in progress(contexts, "contexts"):
            steps, batches = dict[str, Callable[[], dict[str, float]]](), list[Batch]()
            for name, (side, parts) in sides.items():
                batches.append(Batch(side, [context] * NUM_REQUESTS, HEADROOM))
                lane = Lane(Side(side, FakeDevice()), batches[-1])
                steps[name] = lambda parts=parts, lane=lane: parts.step(lane.step)  # type: ignore[misc]
            steps_in_turns(steps, 2, turn=1)  # The first admits the requests.
            for name, times in steps_in_turns(steps, repeats, turn=1).items():
                found[name][context] = {part: min(each[part] for each in times) for part in times[0]}
            for batch in batches:
                batch.leave()
    return found


def draw(path: Path, found: Mapping[str, Mapping[str, Mapping[int, Mapping[str, float]]]]) -> None:
    from benchmarks.harness.plots import draw_grid

    plots = {
        f"{family}: tokens of context": {
            f"{side}: {part}": {context: times[part] for context, times in points.items()}
            for side, points in sides.items()
            for part in ("attention", "choice", "rest")
            if side == "chosen" or part == "attention"
        }
        for family, sides in found.items()
    }
    draw_grid(path, {"ms a step": plots})


def main() -> None:
    parser = make_parser(__doc__, repeats=7, has_plot=True)
    parser.add_argument("--family", choices=FAMILIES, help="measure this one alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    contexts, repeats = (CONTEXTS[:1], 1) if args.quick else (CONTEXTS, args.repeats)
    known = ModelRegistry.get_supported_archs()
    found, rows = {}, list[dict[str, Any]]()
    for family, configs in FAMILIES.items():
        if configs[0]["architectures"][0] not in known or args.family not in (None, family):
            continue
        found[family] = measure(dict(zip(("chosen", "all"), configs, strict=True)), contexts, repeats)
        for context in contexts:
            chosen, all_keys = (found[family][side][context] for side in ("chosen", "all"))
            rows.append({"model": family, "context": context, **{f"{part}_ms": ms for part, ms in chosen.items()}})
            rows[-1] |= {f"all_{part}_ms": all_keys[part] for part in ("step", "attention")}
            rows[-1]["all_to_chosen"] = all_keys["step"] / chosen["step"]
    show(rows, args.json)
    if args.plot:
        draw(args.plot, found)


if __name__ == "__main__":
    main()
