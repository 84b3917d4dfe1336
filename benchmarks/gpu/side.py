"""One side of benchmarks.gpu: an engine in a process of its own, which does the jobs that it is told.

Its argument is a JSON object: the worker's class, the platform if it is not vLLM's own choice, and the options of
``LLM``. Then it reads jobs, a JSON line each, and answers each with a line: ``{"result": ...}`` or ``{"error": ...}``.
The first line is the answer to starting.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_NEURON_RUNNER"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Sampling is compared too, and FlashInfer's kernels would not be on every host.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch

from gpu_runner.testing import kernels

WARM_UP_STEPS = 8
CUDA = torch.cuda.is_available()


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def used_bytes() -> int:
    """Bytes of the device that are used, by any process."""
    if not CUDA:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


@dataclass
class Step:
    """Tokens of a step, its start, and the CPU time of the threads that handled it."""

    num_tokens: int
    started: float
    host_ns: int = 0


class Meter:
    """Sits between executor and worker. Costs a clock reading a step unless host time is asked for.

    Host time is thread CPU time in execute_model, sample_tokens and get_output. A thread that waits for CUDA burns CPU
    time too, so the device is made idle before each of them, outside the time: nothing is left to wait for.
    """

    def __init__(self, worker: Any) -> None:
        self.steps: list[Step] = []
        self.times_host = False
        execute, sample = worker.execute_model, worker.sample_tokens

        def execute_model(scheduler_output: Any) -> Any:
            self.steps.append(Step(scheduler_output.total_num_scheduled_tokens, time.perf_counter()))
            return self.call(self.steps[-1], execute, scheduler_output)

        def sample_tokens(grammar_output: Any) -> Any:
            step = self.steps[-1]
            output = self.call(step, sample, grammar_output)
            if self.times_host and hasattr(output, "get_output"):
                get_output = output.get_output
                output.get_output = lambda: self.call(step, get_output)
            return output

        worker.execute_model, worker.sample_tokens = execute_model, sample_tokens

    def call(self, step: Step, function: Callable[..., Any], *args: Any) -> Any:
        if not self.times_host:
            return function(*args)
        synchronize()
        start = time.thread_time_ns()
        result = function(*args)
        step.host_ns += time.thread_time_ns() - start
        return result


class Engine:
    """An ``LLM`` in this process, and the figures of its start."""

    def __init__(self, worker: str, platform: str | None, options: dict[str, Any]) -> None:
        self.is_kernel_free = False
        if platform is not None:
            from model_runner_base.testing.platform_choice import choose_platform

            choose_platform(platform)
        else:
            self.is_kernel_free = kernels.stand_in()
        from vllm import LLM
        from vllm.utils.import_utils import resolve_obj_by_qualname

        from model_runner_base.admission import front_end

        front_end.register()  # Where this distribution is not installed, vLLM finds no entry point of it.

        if self.is_kernel_free:
            kernels.register_model()
            compilation = options.get("compilation_config", {}) | kernels.COMPILATION
            options = options | kernels.ENGINE_OPTIONS | {"compilation_config": compilation}
        self.seen: dict[str, Any] = {}
        self.worker: Any = None
        self._watch(resolve_obj_by_qualname(worker))
        start = time.perf_counter()
        self.llm = LLM(worker_cls=worker, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
        self.seen["start_s"] = time.perf_counter() - start
        self.meter = Meter(self.worker)
        self._num_requests = 0

    def _watch(self, worker_cls: Any) -> None:
        """Notes how much memory the KV cache may have, and what capturing takes."""
        determine, warm_up = worker_cls.determine_available_memory, worker_cls.compile_or_warm_up_model

        def determine_available_memory(worker: Any) -> int:
            self.seen["kv_limit_bytes"] = available = determine(worker)
            return available

        def compile_or_warm_up_model(worker: Any) -> Any:
            self.worker = worker
            capture = worker.model_runner.capture_model

            def capture_model() -> Any:
                synchronize()
                before, start = used_bytes(), time.perf_counter()
                result = capture()
                synchronize()
                self.seen["capture_s"] = time.perf_counter() - start
                self.seen["capture_bytes"] = used_bytes() - before
                return result

            worker.model_runner.capture_model = capture_model
            return warm_up(worker)

        worker_cls.determine_available_memory = determine_available_memory
        worker_cls.compile_or_warm_up_model = compile_or_warm_up_model

    # ---- Jobs ----

    def describe(self) -> dict[str, Any]:
        from vllm.device_allocator.cumem import cumem_available

        config = self.llm.llm_engine.vllm_config
        compilation, blocks = config.compilation_config, config.cache_config.num_gpu_blocks
        layers = compilation.static_forward_context.values()
        backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
        return self.seen | {
            "device": torch.cuda.get_device_name() if CUDA else "cpu",
            "attention": sorted(backends),
            "compilation_mode": int(compilation.mode or 0),
            "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", None),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "kernel_free": self.is_kernel_free,
            "can_sleep": bool(cumem_available),
            "kv_bytes": blocks * sum(spec.page_size_bytes for spec in self.worker.get_kv_cache_spec().values()),
        }

    def tokens(self, lengths: list[int], new_tokens: int, logprobs: int | None) -> list[dict[str, Any]]:
        """Greedy tokens, and at each the gap between the two likeliest, in nats (none without log probabilities)."""
        prompts = [self._prompt(length, seed) for seed, length in enumerate(lengths)]
        # Requests end one by one, so that the batch shrinks.
        params = [self._params(max(1, new_tokens - index % 7), logprobs=logprobs) for index in range(len(lengths))]
        results = []
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            (completion,) = output.outputs
            gaps = []
            for position in completion.logprobs or ():
                first, second, *_ = sorted((entry.logprob for entry in position.values()), reverse=True)
                gaps.append(first - second)
            results.append({"tokens": list(completion.token_ids), "gaps": gaps})
        return results

    def steps(self, batch: int, num_steps: int, prompt_tokens: int, times_host: bool) -> dict[str, float]:
        """Tokens a second of steady steps of ``batch`` decodes, or mean host microseconds of such a step.

        With ``prompt_tokens``, a prompt so long joins every step.
        """
        engine, steps = self.llm.llm_engine, self.meter.steps
        steps.clear()
        self.meter.times_host = times_host
        wanted = num_steps + WARM_UP_STEPS
        per_step = batch + prompt_tokens
        for _ in range(batch):
            # A batch takes a few steps to gather.
            engine.add_request(
                self._next_id(), self._prompt(16, self._num_requests), self._params(wanted + batch // 16 + 8)
            )
        gc.collect()
        gc.disable()
        try:
            while engine.has_unfinished_requests():
                is_gathered = bool(steps) and steps[-1].num_tokens in (batch, per_step)
                if prompt_tokens and is_gathered and sum(step.num_tokens == per_step for step in steps) < wanted:
                    prompt = self._prompt(prompt_tokens, self._num_requests)
                    engine.add_request(self._next_id(), prompt, self._params(1))
                engine.step()
        finally:
            gc.enable()
            self.meter.times_host = False
        chosen = [index for index, step in enumerate(steps) if step.num_tokens == per_step][WARM_UP_STEPS:]
        if len(chosen) < max(2, num_steps // 2):
            raise RuntimeError(f"{len(chosen)} steps of {per_step} tokens were seen, {num_steps} were wanted")
        if times_host:
            return {"host_us": fmean(steps[index].host_ns for index in chosen) / 1e3}
        first, last = chosen[0], chosen[-1]
        tokens = sum(step.num_tokens for step in steps[first:last])
        return {"tok_s": tokens / (steps[last].started - steps[first].started)}

    def sleep(self, level: int, lengths: list[int], new_tokens: int) -> dict[str, Any]:
        """Bytes given back by sleeping, and whether the tokens are the same after waking up."""
        before, awake = self.tokens(lengths, new_tokens, None), used_bytes()
        self.llm.sleep(level)
        freed = awake - used_bytes()
        if level == 2:
            self.llm.wake_up(tags=["weights"])
            self.llm.collective_rpc("reload_weights")
            self.llm.wake_up(tags=["kv_cache"])
        else:
            self.llm.wake_up()
        return {"freed_bytes": freed, "same_tokens": self.tokens(lengths, new_tokens, None) == before}

    # ---- Helpers ----

    def _next_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests)

    def _prompt(self, length: int, seed: int) -> Any:
        vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        numbers = Random(seed)
        return {"prompt_token_ids": [numbers.randrange(vocabulary) for _ in range(length)]}

    def _params(self, max_tokens: int, **options: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **options)


def main() -> None:
    # vLLM's own output goes to the error stream, so that standard output has the answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(__file__).parents[2]))

    def answer(job: Callable[[], Any]) -> bool:
        try:
            print(json.dumps({"result": job()}), file=answers)
        except Exception:
            print(json.dumps({"error": traceback.format_exc()}), file=answers)
            return False
        return True

    engine: Engine

    def start() -> dict[str, Any]:
        nonlocal engine
        engine = Engine(**json.loads(sys.argv[1]))
        return engine.describe()

    if not answer(start):
        return
    for line in sys.stdin:
        job = json.loads(line)
        method = getattr(engine, job.pop("job"))
        answer(lambda method=method, job=job: method(**job))  # type: ignore[misc]


if __name__ == "__main__":
    main()
