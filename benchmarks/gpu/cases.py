"""Cases that ``benchmarks.gpu`` compares, by section, and how a case is judged."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from typing import Any

from benchmarks.harness.models import random_llama, saved_llama
from benchmarks.harness.process import Side, SideEnded, SideError, environment

Row = dict[str, Any]
OK, FAILED, NOT_HERE = "ok", "FAILED", "not available here"
START_S, JOB_S = 150.0, 60.0
"""Time limits of starting a side and of one job."""
MIXED_PROMPT = 512
"""Tokens of the prompt that joins every mixed step."""
HOST_BOUND = 0.7
"""Host time's share of a step of vLLM's runner above which the step counts as bound by the host."""


@dataclass(frozen=True)
class Model:
    """A random Llama, and bytes of KV cache for the largest batch."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    kv_bytes: int
    graphs: str = "FULL_DECODE_ONLY"


@dataclass(frozen=True)
class TokenCase:
    """One way to run the small checkpoint; ``graphs`` is vLLM's cudagraph_mode."""

    name: str
    dtype: str = "float32"
    is_async: bool = True
    graphs: str = "NONE"

    @property
    def title(self) -> str:
        return f"{self.name} ({self.dtype})"


@dataclass(frozen=True)
class Plan:
    """Settings that differ between a GPU and a rehearsal."""

    stock: str
    ours: str
    platform: str | None
    token_cases: Sequence[TokenCase]
    models: Sequence[Model]
    batches: Sequence[int]
    num_steps: int
    """Steps timed in the smallest batches; large batches have fewer, down to a quarter."""
    repeats: int
    sized_by: dict[str, Any]
    """Engine options by which the memory section lets the engine size its cache."""
    patience: float = 1.0
    """Factor of the time limits: a machine that rehearses may be slow and busy."""
    can_sleep: bool = False
    """Whether vLLM's allocator for sleep mode exists."""
    notes: list[str] = field(default_factory=list)
    """Messages about settings that fell back to others."""

    def workers(self) -> dict[str, str]:
        return {"vllm": self.stock, "ours": self.ours}


TOKEN_TOLERANCE = {"float32": 0.0, "bfloat16": 0.1}
"""Nats between the two likeliest tokens up to which a difference is a tie."""
_SAVING = Lock()
PROMPT_LENGTHS = [1, 5, 17, 33, 64, 100, 150, 40, 3, 200, 90, 16]
NEW_TOKENS = 24
CHECKPOINT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    # Weights of this size set the likeliest tokens apart.
    "initializer_range": 0.1,
}
SMALL_ENGINE = {
    "max_model_len": 256,
    # Fewer than the prompts need: they are chunked, queued and mixed with decodes.
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 64 << 20,
}

GPU = Plan(
    stock="vllm.v1.worker.gpu_worker.Worker",
    ours="gpu_runner.GPUWorker",
    platform=None,
    token_cases=(
        TokenCase("eager, sync", is_async=False),
        TokenCase("eager"),
        TokenCase("decode graphs", graphs="FULL_DECODE_ONLY"),
        TokenCase("decode graphs, sync", is_async=False, graphs="FULL_DECODE_ONLY"),
        TokenCase("piecewise graphs", graphs="PIECEWISE"),
        TokenCase("full and piecewise graphs", graphs="FULL_AND_PIECEWISE"),
        TokenCase("eager", "bfloat16"),
        TokenCase("decode graphs", "bfloat16", graphs="FULL_DECODE_ONLY"),
        TokenCase("full and piecewise graphs", "bfloat16", graphs="FULL_AND_PIECEWISE"),
    ),
    models=(
        Model("tiny", 2, 128, 4, 512, 1 << 30),
        Model("100M", 12, 768, 12, 32000, 4 << 30),
        Model("1B", 24, 2048, 32, 32000, 14 << 30),
        Model("tiny", 2, 128, 4, 512, 1 << 30, "FULL_AND_PIECEWISE"),
    ),
    batches=(1, 8, 64, 256, 1024),
    num_steps=160,
    repeats=3,
    sized_by={"gpu_memory_utilization": 0.5},
)
REHEARSAL = Plan(
    stock="examples.plain_device.PlainWorker",
    ours="examples.plain_device.PlainWorker",
    platform="examples.plain_device.PlainPlatform",
    token_cases=(TokenCase("eager"),),
    models=(Model("tiny", 1, 64, 2, 128, 16 << 20, "NONE"),),
    batches=(2,),
    num_steps=8,
    repeats=1,
    sized_by={"kv_cache_memory_bytes": 16 << 20},
    patience=10,
)


def graph_options(graphs: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Engine options. Only piecewise graphs need vLLM's compilation; everything else runs uncompiled on both sides."""
    if graphs == "NONE":
        return {"enforce_eager": True}
    mode = 3 if "PIECEWISE" in graphs else 0
    return {"compilation_config": {"mode": mode, "cudagraph_mode": graphs, "cudagraph_capture_sizes": list(sizes)}}


def start(name: str, worker: str, platform: str | None, options: dict[str, Any]) -> Side:
    """An engine in a process of its own; see side.py."""
    spec = json.dumps({"worker": worker, "platform": platform, "options": options})
    return Side(name, [sys.executable, "-m", "benchmarks.gpu.side", spec], environment())


class Pair:
    """Processes of both sides of a case, started together."""

    def __init__(self, plan: Plan, options: dict[str, Any], case: str) -> None:
        self._stack = ExitStack()
        self._limit_s = plan.patience * JOB_S
        try:
            self.sides = {
                name: self._stack.enter_context(start(name, worker, plan.platform, options))
                for name, worker in plan.workers().items()
            }
            self.about = {name: side.answer(plan.patience * START_S) for name, side in self.sides.items()}
        except BaseException:
            self._stack.close()
            raise
        asked = options.get("compilation_config", {}).get("cudagraph_mode", "NONE")
        for name, about in self.about.items():
            if about["cudagraph_mode"] not in (asked, None):
                plan.notes.append(f"{case}: {name} was asked for graphs {asked} and has {about['cudagraph_mode']}")

    def ask(self, job: str, **arguments: Any) -> dict[str, Any]:
        """Asks one side after the other, so that only one of them works at a time."""
        return {name: side.ask(job, self._limit_s, **arguments) for name, side in self.sides.items()}

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# ---- Tokens ----


def check_tokens(plan: Plan, case: TokenCase) -> Iterator[Row]:
    with ExitStack() as stack:
        # The random seed is the process's: only one thread may use it at a time.
        with _SAVING:
            model = stack.enter_context(saved_llama(**CHECKPOINT))
        options = SMALL_ENGINE | graph_options(case.graphs, (1, 2, 4, 8, 16, 32, 64, 96))
        options |= {"model": str(model), "dtype": case.dtype, "async_scheduling": case.is_async}
        pair = stack.enter_context(Pair(plan, options, case.title))
        judged = pair.ask("tokens", lengths=PROMPT_LENGTHS, new_tokens=NEW_TOKENS, logprobs=2)
        plain = pair.ask("tokens", lengths=PROMPT_LENGTHS, new_tokens=NEW_TOKENS, logprobs=None)
        for title, answers in (("with log probabilities", judged), ("tokens alone", plain)):
            row = {"case": case.title, "requests": title}
            row |= compare_tokens(answers, judged["vllm"], TOKEN_TOLERANCE[case.dtype])
            yield row | {"attention": "/".join(pair.about["ours"]["attention"])}


def compare_tokens(answers: dict[str, Any], judged: list[dict[str, Any]], tolerance: float) -> Row:
    """Number of requests that got other tokens, and the widest gap (nats) that a first difference had to bridge.

    Up to a request's first difference both sides had the same context, so the gap that vLLM's own runner saw there
    tells a tie from a fault. Where that run itself went another way, nothing excuses the difference.
    """
    differing, widest = 0, 0.0
    for theirs, ours, known in zip(answers["vllm"], answers["ours"], judged, strict=True):
        expected, got = theirs["tokens"], ours["tokens"]
        if expected == got:
            continue
        differing += 1
        pairs = zip(expected, got, strict=False)
        at = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        is_known = at is not None and known["tokens"][:at] == expected[:at]
        widest = max(widest, known["gaps"][at] if is_known else float("inf"))
    status = OK if not differing or widest <= tolerance else FAILED
    return {
        "status": status,
        "differing": f"{differing} of {len(judged)}",
        "gap": round(widest, 4) if widest != float("inf") else "length or context",
        "allowed": tolerance,
    }


# ---- Speed ----


def compare_speed(plan: Plan, model: Model) -> Iterator[Row]:
    largest = max(plan.batches)
    with random_llama(model.num_layers, model.hidden_size, model.num_heads, model.vocab_size) as path:
        sizes = [1 << power for power in range(largest.bit_length()) if 1 << power <= largest]
        options = graph_options(model.graphs, sizes) | {
            "model": str(path),
            "load_format": "dummy",
            "dtype": "float32" if plan.platform else "bfloat16",
            "max_model_len": 1024,
            # A mixed step's prompt has a row of its own.
            "max_num_seqs": largest + 8,
            "max_num_batched_tokens": max(2048, 2 * largest),
            "gpu_memory_utilization": 0.3,
            "kv_cache_memory_bytes": model.kv_bytes,
        }
        with Pair(plan, options, f"{model.name}, {model.graphs}") as pair:
            for steps in ("decode", "mixed"):
                for batch in plan.batches:
                    try:
                        speeds = measure(plan, pair, batch, steps == "mixed")
                    except SideEnded:
                        raise
                    except SideError as error:
                        yield failed(f"{model.name} {steps} {batch}", error)
                        continue
                    yield {"model": model.name, "graphs": model.graphs, "steps": steps, "batch": batch} | speeds


def measure(plan: Plan, pair: Pair, batch: int, is_mixed: bool) -> Row:
    num_steps = max(plan.num_steps // 4, plan.num_steps * 16 // (16 + batch))
    job = {"batch": batch, "num_steps": num_steps, "prompt_tokens": MIXED_PROMPT if is_mixed else 0}
    pair.ask("steps", times_host=False, **(job | {"num_steps": 4}))
    runs = [pair.ask("steps", times_host=False, **job) for _ in range(plan.repeats)]
    theirs, mine = (median(speeds[name]["tok_s"] for speeds in runs) for name in ("vllm", "ours"))
    host = pair.ask("steps", times_host=True, **job)
    their_us, my_us = (host[name]["host_us"] for name in ("vllm", "ours"))
    step_us = (batch + (MIXED_PROMPT if is_mixed else 0)) / theirs * 1e6
    target = 1.2 if their_us > HOST_BOUND * step_us else 1.0
    return {
        "status": OK,
        "vllm_tok_s": theirs,
        "ours_tok_s": mine,
        "ratio": mine / theirs,
        "vllm_host_us": their_us,
        "ours_host_us": my_us,
        "host_ratio": their_us / my_us,
        "target": target,
        "met": mine / theirs >= target,
    }


# ---- Memory ----


def compare_memory(plan: Plan) -> Iterator[Row]:
    """Compares memory: each side is alone on the device and sizes its cache itself."""
    model = plan.models[min(1, len(plan.models) - 1)]
    about = {}
    with random_llama(model.num_layers, model.hidden_size, model.num_heads, model.vocab_size) as path:
        options = graph_options(model.graphs, [1 << power for power in range(9)]) | plan.sized_by
        options |= {"model": str(path), "load_format": "dummy", "max_model_len": 1024, "max_num_batched_tokens": 2048}
        options |= {"max_num_seqs": 256, "dtype": "float32" if plan.platform else "bfloat16"}
        for name, worker in plan.workers().items():
            with start(name, worker, plan.platform, options) as side:
                about[name] = side.answer(plan.patience * START_S)
    for what in ("kv_limit_bytes", "kv_bytes", "capture_bytes", "capture_s", "start_s"):
        values = {name: each.get(what, 0) for name, each in about.items()}
        row = {"what": what, "status": OK, **values}
        row["ratio"] = values["ours"] / values["vllm"] if values["vllm"] else "-"
        if what.startswith("kv_"):
            row["target"] = "0.95 to 1.05"
            row["met"] = bool(values["vllm"]) and abs(row["ratio"] - 1) <= 0.05
        yield row


def check_sleep(plan: Plan, level: int) -> Iterator[Row]:
    what = f"sleep level {level}"
    if not plan.can_sleep:
        yield {"what": what, "status": NOT_HERE, "detail": "vLLM's CuMemAllocator (vllm.cumem_allocator)"}
        return
    with saved_llama(**CHECKPOINT) as model:
        options = SMALL_ENGINE | {"model": str(model), "dtype": "float32", "enforce_eager": True}
        options["enable_sleep_mode"] = True
        for name, worker in plan.workers().items():
            with start(name, worker, plan.platform, options) as side:
                side.answer(plan.patience * START_S)
                result = side.ask("sleep", plan.patience * JOB_S, level=level, lengths=[5, 40], new_tokens=8)
            yield {"what": what, "side": name, "status": OK if result["same_tokens"] else FAILED} | result


def failed(case: str, error: BaseException) -> Row:
    """Row of a failed case. Its ``error`` goes to the JSON; the table shows ``detail``, the error's last line."""
    text = str(error).strip() or repr(error)
    return {"case": case, "status": FAILED, "detail": text.splitlines()[-1][-160:], "error": text[-2000:]}
